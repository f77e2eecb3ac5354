"""Schedules as data: which stage does what at which tick. Numpy only.

A stack of layers is divided into S stages with R chunks each. Chunk r of stage s is
part r * S + s of the stack, so a microbatch goes around the ring of stages R times. At
every tick, a stage does at most one forward and one backward, each of one chunk for one
microbatch, the forward first. Its neighbor uses the results at the next tick.

  gpipe        all forwards, then all backwards: saved inputs grow with microbatches
  1f1b         each backward as early as possible: at most 2S - 1 saved inputs
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
      num_chunks: chunks of layers on each stage (R).
      forward: [tick, stage, (microbatch, chunk)], IDLE if a stage does no forward.
      backward: the same for backwards, which follow the forward of the same tick.
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
        """The slot of each saved input, [stage, microbatch, chunk].

        An input waits in its slot for its backward. A stage uses the lowest free slot.
        """
        R = self.num_chunks
        shape = self.num_stages, self.num_microbatches, R
        slots = np.full(shape, IDLE)
        for stage in range(self.num_stages):
            free: list[int] = []
            used, assigned = 0, {}
            # Each pair of microbatch and chunk as one integer.
            tables = (self.forward[:, stage], self.backward[:, stage])
            ids = [
                np.where(m == IDLE, IDLE, m * R + r) for m, r in (t.T for t in tables)
            ]
            for start, end in zip(*(row.tolist() for row in ids), strict=True):
                if start != IDLE:
                    if not free:
                        free, used = [used], used + 1
                    assigned[start] = heapq.heappop(free)
                if end != IDLE:
                    heapq.heappush(free, assigned[end])
            slots[stage].flat[list(assigned)] = list(assigned.values())
        return slots

    @functools.cached_property
    def num_slots(self) -> int:
        """The largest number of inputs that any stage has saved at once.

        An input is saved from its forward through the tick of its backward.
        """
        begun, done = (t[..., 0] != IDLE for t in (self.forward, self.backward))
        waiting = np.cumsum(begun, axis=0) - np.cumsum(done, axis=0) + done
        return int(waiting.max())


def make(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """Returns the schedule of that name.

    Args:
      num_chunks: for interleaved only, default 2.
    """
    if name not in NAMES:
        raise ValueError(f"schedule must be one of {', '.join(NAMES)}, got {name!r}")
    for what, value in (
        ("stages", num_stages),
        ("microbatches", num_microbatches),
        ("chunks", 1 if num_chunks is None else num_chunks),
    ):
        if value < 1:
            raise ValueError(f"the number of {what} must be >= 1, got {value}")
    if name != "interleaved" and num_chunks not in (None, 1):
        raise ValueError(
            f"schedule {name} has one chunk of layers per stage, got {num_chunks}. "
            "Leave chunks unset, or use schedule interleaved."
        )
    S, M = num_stages, num_microbatches
    R = (num_chunks or 2) if name == "interleaved" else 1
    m, r, s = np.meshgrid(np.arange(M), np.arange(R), np.arange(S), indexing="ij")
    # Microbatches go around in groups of S. A group starts when the previous one has
    # left stage 0 for the last time.
    group, offset = m // S * R * S, m % S
    forward = group + r * S + offset + s
    first = forward.max() + 1 if name == "gpipe" else R * S - 1
    backward = first + group + (R - 1 - r) * S + offset + (S - 1 - s)
    num_ticks = int(backward.max()) + 1
    tables = np.full((2, num_ticks, S, 2), IDLE)
    for table, tick in zip(tables, (forward, backward), strict=True):
        table[tick, s, 0], table[tick, s, 1] = m, r
    return Schedule(name, S, M, R, *tables)


def check(schedule: Schedule) -> None:
    """Raises ValueError unless each operation occurs once, one tick after its input."""
    S, M, R = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    ticks = {}
    for kind, table in (("forward", schedule.forward), ("backward", schedule.backward)):
        if table.shape != (schedule.num_ticks, S, 2):
            raise ValueError(
                f"schedule {schedule.name}: the table of {kind}s must have the shape "
                f"[{schedule.num_ticks} ticks, {S} stages, 2], got {table.shape}"
            )
        tick, stage = np.nonzero(table[..., 0] != IDLE)
        m, r = table[tick, stage].T
        valid = (m >= 0) & (m < M) & (r >= 0) & (r < R)
        ids = ((m * R + r) * S + stage)[valid]
        counts = np.bincount(ids, minlength=M * R * S)
        if not valid.all() or np.any(counts != 1):
            distinct = np.unique(np.stack([m, r, stage]), axis=1).shape[1]
            raise ValueError(
                f"schedule {schedule.name}: expected each {kind} of {M} microbatches, "
                f"{R} chunks and {S} stages exactly once, found {len(tick)} "
                f"operations, {distinct} of them distinct"
            )
        ticks[kind] = np.zeros((M, R * S), int)
        ticks[kind][m, r * S + stage] = tick
    forward, backward = ticks["forward"], ticks["backward"]
    no_input = np.zeros((M, 1), bool)  # the first operation of each microbatch
    _refuse(
        schedule,
        np.concatenate([no_input, forward[:, 1:] != forward[:, :-1] + 1], axis=1),
        "its forward must come one tick after that of {before}",
    )
    _refuse(
        schedule,
        np.concatenate([backward[:, :-1] != backward[:, 1:] + 1, no_input], axis=1),
        "its backward must come one tick after that of {after}",
    )
    _refuse(schedule, backward < forward, "its backward comes before its forward")


def _refuse(schedule: Schedule, wrong: np.ndarray, why: str) -> None:
    """Raises ValueError for the first True of `wrong`, [microbatch, part of stack]."""
    if not wrong.any():
        return
    m, part = map(int, np.argwhere(wrong)[0])
    S = schedule.num_stages

    def label(part: int) -> str:
        return f"microbatch {m}, chunk {part // S}, stage {part % S}"

    raise ValueError(
        f"schedule {schedule.name}: {label(part)}: "
        + why.format(before=label(part - 1), after=label(part + 1))
    )
