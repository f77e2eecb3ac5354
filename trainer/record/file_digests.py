"""Digests of files, stored with size and time so that no file is read twice."""

import concurrent.futures
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from ...sharding.text import duration, human_bytes

CHUNK = 2**20
NUM_THREADS = 4
# Interval between progress lines.
PROGRESS_SECONDS = 5.0
# A file modified this recently could change again within one tick of the file system's
# clock, and would look unchanged.
FRESH_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Size, modification time and digest of a file."""

    size: int
    mtime_ns: int  # 0 if the file was too new to be recognized by its time
    digest: str


def stat(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def read(
    files: Mapping[str, str],
    kept: Mapping[str, Iterable[Stamp]],
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Stamp]:
    """Returns the stamp of each file; reads only those without a stamp in `kept`.

    Args:
      files: {name: path}.
      kept: stamps from earlier runs, by name.
    """
    known, to_read = {}, {}
    for name, path in files.items():
        size, mtime_ns = stat(path)
        for stamp in kept.get(name, ()):
            if (stamp.size, stamp.mtime_ns) == (size, mtime_ns):
                known[name] = stamp
        if name not in known:
            to_read[name] = path
    total = sum(os.stat(path).st_size for path in to_read.values())
    progress = _Progress(total, say, clock)
    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "digest") as pool:
        stamps = pool.map(lambda path: _stamp(path, progress), to_read.values())
        known |= dict(zip(to_read, stamps, strict=True))
    return {name: known[name] for name in files}


def _stamp(path: str, progress: "_Progress") -> Stamp:
    before, began = stat(path), time.time()
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress.add(len(chunk))
    if stat(path) != before:
        raise ValueError(
            f"'{path}' changed while it was read. Start again with files that nothing "
            "modifies."
        )
    size, mtime_ns = before
    is_fresh = began - mtime_ns / 1e9 < FRESH_SECONDS
    return Stamp(size, 0 if is_fresh else mtime_ns, digest.hexdigest())


class _Progress:
    """Prints progress lines if reading takes long; may be called from any thread."""

    def __init__(self, total: int, say: Callable[[str], None], clock):
        self._total, self._say, self._clock = total, say, clock
        self._done, self._lock = 0, threading.Lock()
        self._began = self._last_line = clock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if now - self._last_line < PROGRESS_SECONDS:
                return
            self._last_line = now
            left = (now - self._began) * (self._total / self._done - 1)
            self._say(
                "Reading the data once for its digest: "
                f"{human_bytes(self._done)} of {human_bytes(self._total)}, "
                f"{duration(left)} left"
            )
