"""Obeys one coordinator: the one with the highest term that was ever heard of."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..wire.errors import OldTerm

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Fence:
    """Lets in the messages of a coordinator, unless it was deposed.

    For each job one message is handled at a time. So what a deposed coordinator began
    is over before the first answer to its successor, and nothing of it comes later.

    Attributes:
      term: the highest so far; a message without a term is older than all.
    """

    def __init__(self):
        self.term = 0
        self._lock = threading.Lock()  # guards `term` and the table of locks
        self._busy: dict[str, threading.Lock] = {}

    def guarded(self, handler: Handler) -> Handler:
        """Returns a handler that refuses older terms."""

        def handle(message: dict[str, Any]) -> dict[str, Any]:
            with self.entered(message):
                return handler(message)

        return handle

    @contextlib.contextmanager
    def entered(self, message: Mapping[str, Any]) -> Iterator[None]:
        with self._lock:
            busy = self._busy.setdefault(str(message.get("job")), threading.Lock())
        with busy:
            self.admit(message.get("term", 0))
            yield

    def admit(self, term: Any) -> None:
        """Raises OldTerm for a term that is over; remembers one that is new."""
        if type(term) is not int or term < 0:
            raise ValueError(f"term is {term!r}, expected a whole number >= 0")
        with self._lock:
            if term < self.term:
                raise OldTerm(
                    f"this server obeys the coordinator of term {self.term}, and was "
                    f"called by one of term {term}, which is over. If that one belongs "
                    "to a new service in another folder, restart the server"
                )
            self.term = term
