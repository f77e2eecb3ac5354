"""Events, which the engine takes in, and decisions, which it returns.

All are frozen dataclasses that go to JSON and back: the log of a job is their list.
"""

import dataclasses
import math
from typing import Any

Ranges = tuple[tuple[int, int], ...]


class Record:
    """Something that can be written to a log as a plain dict with a "kind"."""

    def to_json(self) -> dict[str, Any]:
        assert dataclasses.is_dataclass(self) and not isinstance(self, type)
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Joined(Record):
    """A learner has joined; a restarted one has a larger incarnation."""

    time: float
    learner: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Left(Record):
    """A learner has left, or has not been heard of for too long.

    Attributes:
      failed: whether that may be the fault of the data that it computed on.
    """

    time: float
    learner: int
    incarnation: int
    reason: str
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class Contributed(Record):
    """All pieces of a contribution have arrived.

    Attributes:
      base: the version that the round started from. With several fragments only the
        one of the round before was read then.
      weight: number of tokens (or examples) that count.
      steps: local steps that were done.
    """

    time: float
    learner: int
    incarnation: int
    round: int
    base: int
    weight: float
    steps: int

    def __post_init__(self):
        if not math.isfinite(self.weight) or self.weight < 0:
            raise ValueError(
                f"learner {self.learner}, round {self.round}: weight must be a number "
                f">= 0, got {self.weight}"
            )
        if self.steps < 1:
            raise ValueError(
                f"learner {self.learner}, round {self.round}: steps must be >= 1, got "
                f"{self.steps}"
            )


@dataclasses.dataclass(frozen=True)
class Tick(Record):
    """Time has passed; needed at `Engine.deadline`."""

    time: float


@dataclasses.dataclass(frozen=True)
class Stopped(Record):
    """The job is to end now, before its last round."""

    time: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Restored(Record):
    """The servers restarted from a checkpoint: everybody must join again.

    The log has an entry of its own for this (history.py), not an event.
    """

    time: float


@dataclasses.dataclass(frozen=True)
class Release(Record):
    """A learner may begin a round, from a version.

    Attributes:
      blocks: ranges [first, stop) of the blocks of data that are leased for this round.
      ahead: those that are leased for its next round.
    """

    learner: int
    incarnation: int
    round: int
    version: int
    blocks: Ranges = ()
    ahead: Ranges = ()


@dataclasses.dataclass(frozen=True)
class Contribution(Record):
    """A contribution as part of a commit.

    Attributes:
      blocks: ranges of the blocks of data that the commit consumes by it; none if an
        earlier commit has done so.
    """

    learner: int
    incarnation: int
    round: int
    base: int
    weight: float
    coefficient: float
    is_reused: bool
    blocks: Ranges = ()


@dataclasses.dataclass(frozen=True)
class Commit(Record):
    """Version `version` is made from the one before.

    The merged value is the sum of coefficient x payload, divided by `divisor`.

    Attributes:
      fragment: the fragment that is updated.
      step: index into the learning-rate schedule.
      share: what part of an update this is.
      contributions: in order of learner.
      set_aside: blocks of data that nobody will get again, since the last commit.
    """

    version: int
    fragment: int
    step: int
    share: float
    divisor: float
    contributions: tuple[Contribution, ...]
    set_aside: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class SetAside(Record):
    """Blocks of data are not leased again: too many learners failed on them."""

    learner: int
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Dropped(Record):
    """A contribution will not be committed (again)."""

    learner: int
    incarnation: int
    round: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Done(Record):
    """A learner has no more rounds to do; None: the job is complete."""

    learner: int | None


Event = Joined | Left | Contributed | Tick | Stopped | Restored
Decision = Release | Commit | Dropped | Done | SetAside
_KINDS = {
    cls.__name__: cls
    for cls in (
        *(Joined, Left, Contributed, Tick, Stopped, Restored),
        *(Release, Commit, Dropped, Done, SetAside),
    )
}


def from_json(data: dict[str, Any]) -> Event | Decision:
    """Makes the event or decision that `to_json` wrote."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(
            f"kind {kind!r} is not an event or decision; expected {', '.join(_KINDS)}"
        )
    if cls is Left:
        fields.setdefault("failed", True)  # of an older log, in which all have
    names = {field.name for field in dataclasses.fields(cls)}
    if wrong := names ^ set(fields):
        raise ValueError(f"{kind}: fields {sorted(wrong)} are missing or unknown")
    if cls is Commit:
        parts = (
            Contribution(**{**part, "blocks": _ranges(part["blocks"])})
            for part in fields["contributions"]
        )
        fields["contributions"] = tuple(parts)
        fields["set_aside"] = tuple(fields["set_aside"])
    elif cls is Release:
        fields |= {name: _ranges(fields[name]) for name in ("blocks", "ahead")}
    elif cls is SetAside:
        fields["blocks"] = tuple(fields["blocks"])
    return cls(**fields)


def _ranges(pairs: list[list[int]]) -> Ranges:
    return tuple((first, stop) for first, stop in pairs)
