"""The places of all learners, as decisions and events change them.

Only the thread of the job uses them; the board (board.py) shows them to others.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..rounds.events import Dropped, Release
from .board import Board, Place
from .members import Member


class Places:
    """The place of each learner that ever joined, by index."""

    def __init__(self):
        self._places: dict[int, Place] = {}

    def get(self, learner: int) -> Place | None:
        return self._places.get(learner)

    def wait(self, learner: int, incarnation: int) -> None:
        """Makes a learner that has joined wait."""
        self._places[learner] = Place(incarnation)

    def leave(self, learner: int, incarnation: int, reason: str) -> None:
        self._places[learner] = Place(incarnation, "left", reason=reason)

    def release(self, release: Release, commit: dict[str, Any] | None) -> None:
        """Lets a learner go.

        Args:
          commit: facts about the newest commit.
        """
        place = self._places[release.learner]
        if place.incarnation == release.incarnation and place.state != "left":
            self._places[release.learner] = dataclasses.replace(
                place,
                state="go",
                round=release.round,
                version=release.version,
                blocks=release.blocks,
                ahead=release.ahead,
                commit=commit,
            )

    def drop(self, dropped: Dropped) -> None:
        """Tells a learner that its contribution was dropped."""
        place = self._places[dropped.learner]
        about = {"round": dropped.round, "reason": dropped.reason}
        if place.incarnation == dropped.incarnation:
            self._places[dropped.learner] = dataclasses.replace(place, dropped=about)

    def end(
        self,
        learner: int | None,
        version: int,
        commit: dict[str, Any] | None,
        reason: str,
    ) -> None:
        """Tells a learner (None: all) that there is no further round."""
        for index, place in self._places.items():
            if learner in (None, index) and place.state != "left":
                self._places[index] = dataclasses.replace(
                    place, state="done", version=version, commit=commit, reason=reason
                )

    def rejoin(self, members: Iterable[Member], reason: str) -> None:
        """Makes members that are not done join again."""
        for member in members:
            member.must_rejoin = True
            if self._places[member.learner].state != "done":
                self.leave(member.learner, member.incarnation, reason)

    def versions_in_use(self) -> set[int]:
        """Returns the versions that learners may still read."""
        # Whoever is done reads the version at which it was, before it leaves.
        reading = ("go", "done")
        return {p.version for p in self._places.values() if p.state in reading}

    def post(self, board: Board, *, may_go: bool) -> None:
        """Shows the places; if nobody may go, who would is shown to wait."""
        places = dict(self._places)
        for learner, place in places.items() if not may_go else ():
            if place.state == "go":
                places[learner] = Place(place.incarnation)
        board.post(places)
