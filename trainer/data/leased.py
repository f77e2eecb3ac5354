"""Batches assigned by the service during the run."""

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

Loaded = concurrent.futures.Future[dict[str, jax.Array]]


class LeasedBatches(Iterator[dict[str, jax.Array]]):
    """Iterates over batches on the devices, read ahead by threads.

    Use it as a context manager.

    Args:
      load: reads a batch, given its number.
      upcoming: returns the numbers of the blocks that come next, as far as they are
        known. What it returned before may have changed.
      prefetch: how many to keep ready besides the next one.
    """

    def __init__(
        self,
        load: Callable[[int], dict[str, jax.Array]],
        upcoming: Callable[[], Sequence[int]],
        prefetch: int,
    ):
        self._load, self._upcoming, self._prefetch = load, upcoming, prefetch
        self._loaded: dict[int, Loaded] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(
            max(prefetch, 1), thread_name_prefix="batches"
        )

    def __next__(self) -> dict[str, jax.Array]:
        numbers = self._upcoming()[: 1 + self._prefetch]
        if not numbers:
            raise StopIteration
        for gone in self._loaded.keys() - set(numbers):
            self._loaded.pop(gone).cancel()
        for number in numbers:
            if number not in self._loaded:
                self._loaded[number] = self._threads.submit(self._load, number)
        return self._loaded.pop(numbers[0]).result()

    def close(self) -> None:
        """Waits for reads that are under way."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "LeasedBatches":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()
