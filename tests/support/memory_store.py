"""A store for groups whose processes are threads of one test."""

import threading
import time
from collections import defaultdict

from meshloom.trainer.job.store import Missing


class MemoryStore:
    """Keys and barriers of `size` threads, each of which has a number of its own.

    `view(n)` is the store as thread n sees it.
    """

    def __init__(self, size: int):
        self.size, self.changed = size, threading.Condition()
        self.items: dict[str, str] = {}
        self.arrived: dict[str, set[int]] = defaultdict(set)

    def view(self, number: int) -> "View":
        return View(self, number)


class View:
    def __init__(self, shared: MemoryStore, number: int):
        self._shared, self._number = shared, number

    def set(self, key, value):
        with self._shared.changed:
            self._shared.items[key] = value
            self._shared.changed.notify_all()

    def get(self, key):
        return self._shared.items.get(key)

    def values(self, folder):
        items = dict(self._shared.items)
        return [v for k, v in items.items() if k.startswith(f"{folder}/")]

    def delete(self, key):
        self._shared.items.pop(key)

    def wait(self, key, seconds):
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: key in shared.items, seconds)
            return shared.items.get(key)

    def barrier(self, key, seconds):
        shared = self._shared
        deadline = time.monotonic() + seconds
        with shared.changed:
            arrived = shared.arrived[key]
            # A key that is used twice would let a thread pass the second one alone.
            assert self._number not in arrived, f"barrier {key!r} is used twice"
            arrived.add(self._number)
            shared.changed.notify_all()
            left = deadline - time.monotonic()
            if not shared.changed.wait_for(lambda: len(arrived) == shared.size, left):
                missing = sorted(set(range(shared.size)) - arrived)
                raise Missing(key, seconds, missing)
