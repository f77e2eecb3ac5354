"""Schedules as data: which stage does what at which tick. Numpy only.

A stack of layers is cut over S stages, and on each stage into R chunks: chunk r of
stage s is the part r * S + s of the stack, so a microbatch goes round the ring of
stages R times. At every tick a stage does at most one forward and one backward of a
chunk for a microbatch, the forward first; what it computes at one tick its neighbour
uses at the next.

  gpipe        every forward, then every backward: saved inputs grow with microbatches
  1f1b         a backward as soon as there is one: at most 2S - 1 saved inputs
  interleaved  1f1b with R chunks: the bubble is R times smaller, at most 2RS - 1 saved
"""

import dataclasses
import functools
from typing import Literal, get_args

import numpy as np

Name = Literal["gpipe", "1f1b", "interleaved"]
NAMES: tuple[Name, ...] = get_args(Name)
IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A table of operations.

    Attributes:
      num_chunks: chunks of layers that each stage holds (R).
      forward: [tick, stage, (microbatch, chunk)], IDLE where a stage does no forward.
      backward: the same for backwards; done after the forward of the same tick.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    forward: np.ndarray
    backward: np.ndarray

    def __post_init__(self):
        check(self)

    @property
    def num_ticks(self) -> int:
        return len(self.forward)

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """[stage, microbatch, chunk]: where the input of a forward waits for its
        backward. A stage uses the lowest place that is free.
        """
        shape = self.num_stages, self.num_microbatches, self.num_chunks
        slots = np.full(shape, IDLE)
        for stage in range(self.num_stages):
            free: list[int] = []
            used = 0
            for tick in range(self.num_ticks):
                m, r = self.forward[tick, stage]
                if m != IDLE:
                    if not free:
                        free, used = [used], used + 1
                    slots[stage, m, r] = free.pop(free.index(min(free)))
                m, r = self.backward[tick, stage]
                if m != IDLE:
                    free.append(slots[stage, m, r])
        return slots

    @property
    def num_slots(self) -> int:
        """Saved inputs of the stage that has most of them at once."""
        return int(self.slots.max()) + 1


def make(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """The schedule of that name. `num_chunks` is for interleaved only, and 2 there."""
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is unknown; there are {', '.join(NAMES)}")
    for what, value in (
        ("stages", num_stages),
        ("microbatches", num_microbatches),
        ("chunks", 1 if num_chunks is None else num_chunks),
    ):
        if value < 1:
            raise ValueError(f"a schedule needs at least 1 of {what}, got {value}")
    if name != "interleaved" and num_chunks not in (None, 1):
        raise ValueError(
            f"schedule {name} has one chunk of layers a stage, but {num_chunks} were "
            "asked for. Leave chunks unset, or take schedule interleaved."
        )
    S, M = num_stages, num_microbatches
    R = (num_chunks or 2) if name == "interleaved" else 1
    m, r, s = np.meshgrid(np.arange(M), np.arange(R), np.arange(S), indexing="ij")
    # Microbatches go round in groups of S: group g starts when the one before it has
    # left stage 0 for the last time.
    group, place = m // S * R * S, m % S
    forward = group + r * S + place + s
    first = forward.max() + 1 if name == "gpipe" else R * S - 1
    backward = first + group + (R - 1 - r) * S + place + (S - 1 - s)
    num_ticks = int(backward.max()) + 1
    tables = np.full((2, num_ticks, S, 2), IDLE)
    for table, tick in zip(tables, (forward, backward), strict=True):
        table[tick, s, 0], table[tick, s, 1] = m, r
    return Schedule(name, S, M, R, *tables)


def check(schedule: Schedule) -> None:
    """Raises ValueError unless every operation stands once, right after its source."""
    S, M, R = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    ticks = {}
    for kind, table in (("forward", schedule.forward), ("backward", schedule.backward)):
        if table.shape != (schedule.num_ticks, S, 2):
            raise ValueError(
                f"schedule {schedule.name}: its table of {kind}s must have the shape "
                f"[{schedule.num_ticks} ticks, {S} stages, 2], got {table.shape}"
            )
        tick, stage = np.nonzero(table[..., 0] != IDLE)
        found = [(*table[t, s], s, t) for t, s in zip(tick, stage, strict=True)]
        places = {(int(m), int(r), int(s)): int(t) for m, r, s, t in found}
        if len(found) != M * R * S or places.keys() != set(np.ndindex(M, R, S)):
            raise ValueError(
                f"schedule {schedule.name}: expected each {kind} of {M} microbatches, "
                f"{R} chunks and {S} stages once, found {len(found)} operations, "
                f"{len(places)} of them different"
            )
        ticks[kind] = places
    forward, backward = ticks["forward"], ticks["backward"]
    for m, r, s in np.ndindex(M, R, S):
        before = (m, r, s - 1) if s else (m, r - 1, S - 1)
        after = (m, r, s + 1) if s < S - 1 else (m, r + 1, 0)
        where = f"schedule {schedule.name}: microbatch {m}, chunk {r}, stage {s}"
        if (s or r) and forward[m, r, s] != forward[before] + 1:
            raise ValueError(
                f"{where}: its forward must follow one tick after {before}"
            )
        if after in backward and backward[m, r, s] != backward[after] + 1:
            raise ValueError(
                f"{where}: its backward must follow one tick after {after}"
            )
        if backward[m, r, s] < forward[m, r, s]:
            raise ValueError(f"{where}: its backward comes before its forward")
