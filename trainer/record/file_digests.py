"""Digests of files, kept with each file's size and time so that none is read twice."""

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
# Lines of progress: the first after so many seconds, then as often.
SAY_SECONDS = 5.0
# A file changed so shortly before it was read could change again within one tick of the
# file system's clock, and would look the same.
FRESH_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What a file looked like when its contents had this digest."""

    size: int
    mtime_ns: int  # 0 where the file was too new to be known again
    digest: str


def stat(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def read(
    files: Mapping[str, str],
    kept: Mapping[str, Iterable[Stamp]],
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Stamp]:
    """The stamp of each file, {name: path}; only those not among `kept` are read."""
    known, wanted = {}, {}
    for name, path in files.items():
        size, mtime_ns = stat(path)
        for stamp in kept.get(name, ()):
            if (stamp.size, stamp.mtime_ns) == (size, mtime_ns):
                known[name] = stamp
        if name not in known:
            wanted[name] = path
    total = sum(os.stat(path).st_size for path in wanted.values())
    progress = _Progress(total, say, clock)
    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "digest") as pool:
        stamps = pool.map(lambda path: _stamp(path, progress), wanted.values())
        known |= dict(zip(wanted, stamps, strict=True))
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
            f"'{path}' changed while it was read. Start again with files that stay as "
            "they are."
        )
    size, mtime_ns = before
    is_fresh = began - mtime_ns / 1e9 < FRESH_SECONDS
    return Stamp(size, 0 if is_fresh else mtime_ns, digest.hexdigest())


class _Progress:
    """Says how far the reading is, where it takes long; from any thread."""

    def __init__(self, total: int, say: Callable[[str], None], clock):
        self._total, self._say, self._clock = total, say, clock
        self._done, self._lock = 0, threading.Lock()
        self._began = self._said = clock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if now - self._said < SAY_SECONDS:
                return
            self._said = now
            left = (now - self._began) * (self._total / self._done - 1)
            self._say(
                "Reading the data once for its digest: "
                f"{human_bytes(self._done)} of {human_bytes(self._total)}, "
                f"{duration(left)} left"
            )
