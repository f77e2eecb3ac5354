"""Streams that may take as long as they need, and not stand still for long."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol


class Call(Protocol):
    def cancel(self) -> object: ...


class Silence:
    """Watches one stream of messages, in a thread of its own.

    Args:
      seconds: between two messages, or from the last one to the answer.

    Attributes:
      is_over: whether it has ended the stream.
    """

    def __init__(self, seconds: float):
        self.seconds, self.is_over = seconds, False
        self._moved = time.monotonic()
        self._is_closed = threading.Event()

    def watch(self, call: Call) -> None:
        """Begins to watch."""
        threading.Thread(target=self._watch, args=(call,), daemon=True).start()

    def moved(self) -> None:
        """Notes that a message was sent or received."""
        self._moved = time.monotonic()

    def close(self) -> None:
        self._is_closed.set()

    def _watch(self, call: Call) -> None:
        while not self._is_closed.wait(self._left):
            if not self._left:
                self.is_over = True
                call.cancel()
                return

    @property
    def _left(self) -> float:
        return max(0.0, self._moved + self.seconds - time.monotonic())


def guarded(
    stream: Iterator[bytes], failed: list[BaseException], moved: Callable[[], None]
) -> Iterator[bytes]:
    """Yields messages; keeps the exception that ended them, for the caller.

    Args:
      moved: called whenever one was taken.
    """
    try:
        for message in stream:
            yield message
            moved()
    except Exception as error:
        failed.append(error)
