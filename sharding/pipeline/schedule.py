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
import heapq
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
        R = self.num_chunks
        shape = self.num_stages, self.num_microbatches, R
        slots = np.full(shape, IDLE)
        for stage in range(self.num_stages):
            free: list[int] = []
            used, places = 0, {}
            # One number for each chunk of each microbatch, as lists of plain numbers.
            tables = (self.forward[:, stage], self.backward[:, stage])
            ids = [
                np.where(m == IDLE, IDLE, m * R + r) for m, r in (t.T for t in tables)
            ]
            for start, end in zip(*(row.tolist() for row in ids), strict=True):
                if start != IDLE:
                    if not free:
                        free, used = [used], used + 1
                    places[start] = heapq.heappop(free)
                if end != IDLE:
                    heapq.heappush(free, places[end])
            slots[stage].flat[list(places)] = list(places.values())
        return slots

    @functools.cached_property
    def num_slots(self) -> int:
        """Saved inputs of the stage that has most of them at once.

        An input waits from its forward up to and with the tick of its backward.
        """
        begun, done = (t[..., 0] != IDLE for t in (self.forward, self.backward))
        waiting = np.cumsum(begun, axis=0) - np.cumsum(done, axis=0) + done
        return int(waiting.max())


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
        m, r = table[tick, stage].T
        inside = (m >= 0) & (m < M) & (r >= 0) & (r < R)
        places = ((m * R + r) * S + stage)[inside]
        counts = np.bincount(places, minlength=M * R * S)
        if not inside.all() or np.any(counts != 1):
            different = np.unique(np.stack([m, r, stage]), axis=1).shape[1]
            raise ValueError(
                f"schedule {schedule.name}: expected each {kind} of {M} microbatches, "
                f"{R} chunks and {S} stages once, found {len(tick)} operations, "
                f"{different} of them different"
            )
        ticks[kind] = np.zeros((M, R * S), int)
        ticks[kind][m, r * S + stage] = tick
    forward, backward = ticks["forward"], ticks["backward"]
    early = np.zeros((M, 1), bool)
    _refuse(
        schedule,
        np.concatenate([early, forward[:, 1:] != forward[:, :-1] + 1], axis=1),
        "its forward must follow one tick after {before}",
    )
    _refuse(
        schedule,
        np.concatenate([backward[:, :-1] != backward[:, 1:] + 1, early], axis=1),
        "its backward must follow one tick after {after}",
    )
    _refuse(schedule, backward < forward, "its backward comes before its forward")


def _refuse(schedule: Schedule, wrong: np.ndarray, why: str) -> None:
    """Raises for the first operation that is wrong; [microbatch, part of the stack]."""
    if not wrong.any():
        return
    m, part = map(int, np.argwhere(wrong)[0])
    S = schedule.num_stages

    def place(part: int) -> tuple[int, int, int]:
        return m, part // S, part % S

    _, r, s = place(part)
    raise ValueError(
        f"schedule {schedule.name}: microbatch {m}, chunk {r}, stage {s}: "
        + why.format(before=place(part - 1), after=place(part + 1))
    )
