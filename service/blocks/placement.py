"""Which servers hold the blocks of a job now, and which will: what a change leads to.

Blocks move while the training goes on. Until all have arrived, contributions go to the
servers that held a block and to those that will hold it; so whichever of them is lost
next, the others have all that was acknowledged.
"""

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from . import hashing
from .layout import Layout

Holders = dict[int, tuple[str, ...]]  # by block
_NAMES = ("before", "lost", "members")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The servers of a job at one epoch.

    Attributes:
      copies: of each block, on as many servers, if there are so many.
      epoch: the number of changes so far.
      since: the epoch from which on contributions reach all servers that need them.
      before: the servers that held all blocks when nothing moved last.
      lost: those of them that are lost.
      members: the servers that will hold all blocks; `before` if nothing moves.
    """

    copies: int
    epoch: int = 0
    since: int = 0
    before: tuple[str, ...]
    lost: tuple[str, ...] = ()
    members: tuple[str, ...]

    @property
    def is_settled(self) -> bool:
        """Whether nothing moves."""
        return self.before == self.members and not self.lost

    @property
    def live(self) -> tuple[str, ...]:
        """All servers that have a part in the job."""
        return tuple(sorted({*self.before, *self.members} - {*self.lost}))

    def holders(self, layout: Layout, job: str) -> Holders:
        """Returns the servers that have each block whatever has moved so far."""
        found = hashing.holders(layout, job, self.before, self.copies)
        return {b: tuple(n for n in x if n not in self.lost) for b, x in found.items()}

    def is_held_by(self, layout: Layout, job: str, names: Container[str]) -> bool:
        """Returns whether these servers have a copy of every block."""
        found = self.holders(layout, job).values()
        return all(any(name in names for name in holders) for holders in found)

    def targets(self, layout: Layout, job: str) -> Holders:
        """Returns the servers to which contributions go: holders first."""
        found = self.holders(layout, job)
        if self.members == self.before or not self.members:
            return found
        after = hashing.holders(layout, job, self.members, self.copies)
        return {b: tuple(dict.fromkeys((*found[b], *after[b]))) for b in found}

    def without(self, name: str) -> "Placement":
        """Returns what follows when a server is lost."""
        lost = {*self.lost, name} & {*self.before}
        members = tuple(n for n in self.members if n != name)
        return self._changed(lost=tuple(sorted(lost)), members=members)

    def with_members(self, names: tuple[str, ...]) -> "Placement":
        """Returns what follows when servers come, or will go."""
        return self._changed(members=tuple(sorted(names)))

    def settled(self) -> "Placement":
        """Returns what follows when all blocks have arrived."""
        return dataclasses.replace(
            self, epoch=self.epoch + 1, before=self.members, lost=()
        )

    def _changed(self, **fields: Any) -> "Placement":
        epoch = self.epoch + 1
        return dataclasses.replace(self, epoch=epoch, since=epoch, **fields)

    def to_json(self) -> dict[str, Any]:
        return {
            **{"copies": self.copies, "epoch": self.epoch, "since": self.since},
            **{name: list(getattr(self, name)) for name in _NAMES},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Placement":
        numbers = (int(data[name]) for name in ("copies", "epoch", "since"))
        copies, epoch, since = numbers
        before, lost, members = (tuple(map(str, data[name])) for name in _NAMES)
        return cls(
            copies=copies,
            epoch=epoch,
            since=since,
            before=before,
            lost=lost,
            members=members,
        )
