"""A small disk that a test fills and empties: a tmpfs in a namespace of its own."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


class Disk:
    """A disk that is mounted for processes that are started with `around`.

    Attributes:
      root: its root folder as others see it.
    """

    def __init__(self, folder: Path, holder: int, around: list[str]):
        self.around, self.root = around, f"/proc/{holder}/root"
        self._filler = Path(f"{self.root}{folder}/filler")

    def fill(self) -> None:
        """Leaves no space at all."""
        with open(self._filler, "wb", buffering=0) as filler:
            with contextlib.suppress(OSError):
                while filler.write(bytes(4096)):
                    pass

    def empty(self) -> None:
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Disk]:
    """Mounts a disk on a folder; needs root."""
    mount = f"mount -t tmpfs -o size={megabytes}m none '{folder}'"
    holder = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{mount} && exec sleep 1000"],
        start_new_session=True,
    )
    try:
        around = ["nsenter", "-t", str(holder.pid), "-m"]
        disk = Disk(folder, holder.pid, around)
        deadline = time.monotonic() + 20
        while not os.path.ismount(f"{disk.root}{folder}"):
            assert holder.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield disk
    finally:
        holder.kill()
        holder.wait()
