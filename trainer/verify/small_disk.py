"""A small disk that a drill fills and empties: a tmpfs in a namespace of its own."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...launch.workers import GUARD
from .drill_job import POLL_SECONDS, Failed
from .storage_faults import unshare

START_SECONDS = 20.0
CHUNK_BYTES = 4096


class SmallDisk:
    """A disk that is mounted for the processes of a command that starts with `around`.

    Attributes:
      around: a command that is given another one as arguments.
    """

    def __init__(self, folder: Path, holder: int, around: Sequence[str]):
        self.around = around
        self._filler = Path(f"/proc/{holder}/root{folder}/filler")

    def fill(self) -> None:
        """Leaves no space at all."""
        with open(self._filler, "wb", buffering=0) as filler:
            with contextlib.suppress(OSError):
                while filler.write(bytes(CHUNK_BYTES)):
                    pass

    def empty(self) -> None:
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mounts a disk on a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = f'mount -t tmpfs -o size={megabytes}m none "$0" && exec sleep infinity'
    guard = [*GUARD, "worker", str(os.getpid())]
    holder = subprocess.Popen([*guard, *unshare(), "sh", "-c", mount, str(folder)])
    try:
        deadline = time.monotonic() + START_SECONDS
        while not os.path.ismount(f"/proc/{holder.pid}/root{folder}"):
            if holder.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"cannot mount a small disk on {folder}")
            time.sleep(POLL_SECONDS)
        own = [] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]
        around = ["nsenter", "-t", str(holder.pid), "-m", *own]
        yield SmallDisk(folder, holder.pid, around)
    finally:
        holder.kill()
        holder.wait()
