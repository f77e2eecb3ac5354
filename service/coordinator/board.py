"""The board of a job: what each learner may do next, and its last heartbeat.

It is all that the job's thread and the threads of the calls share. Its lock is held for
a few assignments, never during a call, a write to disk or an engine's decision.
"""

import dataclasses
import threading
from typing import Any

from ..rounds.events import Ranges
from ..wire.errors import Unavailable


@dataclasses.dataclass(frozen=True)
class Place:
    """What one incarnation of a learner may do.

    Attributes:
      state: "wait", "go", "done", or "left" (it must join again).
      round, version: with "go", the round to do and the version to start from.
      blocks, ahead: of data, as ranges: for this round, and for the one after it.
      commit: about the commit that made this version: {"norm", "skipped", ...}.
      reason: why it must join again, or why the job was stopped.
      dropped: its last contribution that was dropped: {"round", "reason"}.
    """

    incarnation: int
    state: str = "wait"
    round: int = 0
    version: int = 0
    blocks: Ranges = ()
    ahead: Ranges = ()
    commit: dict[str, Any] | None = None
    reason: str = ""
    dropped: dict[str, Any] | None = None


class Board:
    """Places by learner, written by the job's thread and awaited by calls."""

    def __init__(self):
        self._changed = threading.Condition()
        self._places: dict[int, Place] = {}
        self._heard: dict[tuple[int, int], float] = {}
        self._failure: str | None = None

    def post(self, places: dict[int, Place]) -> None:
        """Replaces places, and wakes up who waits for them."""
        if places:
            with self._changed:
                self._places.update(places)
                self._changed.notify_all()

    def fail(self, message: str) -> None:
        """Gives every call from now on this message instead of an answer."""
        with self._changed:
            self._failure = self._failure or message
            self._changed.notify_all()

    @property
    def failure(self) -> str | None:
        with self._changed:
            return self._failure

    def check(self) -> None:
        """Raises Unavailable if the job has failed."""
        if failure := self.failure:
            raise Unavailable(failure)

    def hear(self, learner: int, incarnation: int, now: float) -> None:
        """Notes that a learner is alive."""
        with self._changed:
            self._heard[learner, incarnation] = now

    def take_heard(self) -> dict[tuple[int, int], float]:
        """Returns who has sent a heartbeat since the last time, and when."""
        with self._changed:
            heard, self._heard = self._heard, {}
        return heard

    def look(self) -> tuple[dict[int, Place], dict[tuple[int, int], float]]:
        """Returns all places, and who has sent a heartbeat since `take_heard`."""
        with self._changed:
            return dict(self._places), dict(self._heard)

    def wait(
        self, learner: int, incarnation: int, after: int, seconds: float
    ) -> dict[str, Any]:
        """Returns what a learner may do, once that is more than to wait.

        Args:
          after: the last round that the learner has begun; it waits for a later one.
          seconds: after this time the answer is to wait, that is, to ask again.
        """

        def is_ready() -> bool:
            if self._failure is not None:
                return True
            place = self._places.get(learner)
            if place is None or place.incarnation < incarnation:
                return False
            if place.incarnation > incarnation or place.state in ("left", "done"):
                return True
            return place.state == "go" and place.round > after

        with self._changed:
            ready = self._changed.wait_for(is_ready, seconds)
            if self._failure is not None:
                raise Unavailable(self._failure)
            place = self._places.get(learner, Place(incarnation))
        if not ready:
            return {"state": "wait", "dropped": place.dropped}
        return answer(place, incarnation)


def answer(place: Place, incarnation: int) -> dict[str, Any]:
    """Returns a place as the answer to one incarnation of its learner."""
    if place.incarnation != incarnation:
        return {
            "state": "left",
            "reason": f"incarnation {place.incarnation} of this learner has joined",
        }
    if place.state == "left":
        return {"state": "left", "reason": place.reason}
    return {
        "state": place.state,
        "round": place.round,
        "version": place.version,
        "blocks": place.blocks,
        "ahead": place.ahead,
        "commit": place.commit,
        "dropped": place.dropped,
        "reason": place.reason,
    }
