"""Turns a schedule into loops: consecutive ticks of the same kind become one scan.

Besides the forwards and backwards of the schedule, all stages share the work outside
the stack. In the steady phase all of it falls on the same ticks: a microbatch is
embedded one tick before its forward on stage 0, and the backward of the embedding runs
one tick after its backward there. The rows therefore start one tick before the schedule
and end one tick after it.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .schedule import IDLE, Schedule


class Kind(NamedTuple):
    """The kinds of work that every stage does at a tick."""

    forward: bool
    backward: bool
    embed: bool  # for the forward on stage 0 at the next tick
    head: bool  # for the backward on the last stage; in evaluation, for the forward
    embed_backward: bool  # for the backward on stage 0 at the previous tick


class TickWork(NamedTuple):
    """What each tick works on, as numpy or jax arrays; IDLE for nothing.

    Attributes:
      forward: [tick, stage, (microbatch, chunk, slot)].
      backward: the same.
      embed, head, embed_backward: [tick], the microbatch.
    """

    forward: Any
    backward: Any
    embed: Any
    head: Any
    embed_backward: Any


@dataclasses.dataclass(frozen=True)
class Loop:
    """A sequence of runs of equal ticks, repeated `times` times."""

    times: int
    runs: tuple[tuple[Kind, int], ...]

    @property
    def num_ticks(self) -> int:
        return self.times * sum(length for _, length in self.runs)


def rows(schedule: Schedule, *, training: bool) -> TickWork:
    """Returns the rows of a schedule; without `training`, only its forwards."""
    S, R = schedule.num_stages, schedule.num_chunks
    forward, backward = schedule.forward, schedule.backward
    if not training:
        last = np.nonzero(forward[..., 0] != IDLE)[0].max() + 1
        forward, backward = forward[:last], np.full_like(forward[:last], IDLE)

    def with_slots(table):
        m, r = table[..., 0], table[..., 1]
        slot = schedule.slots[np.arange(S)[None], m, r]
        table = np.stack([m, r, np.where(m == IDLE, IDLE, slot)], axis=-1)
        return np.pad(table, ((1, 1), (0, 0), (0, 0)), constant_values=IDLE)

    def of(table, stage, chunk):
        m, r, _ = table[:, stage].T
        return np.where(r == chunk, m, IDLE)

    forward, backward = with_slots(forward), with_slots(backward)
    embed, embed_backward = of(forward, 0, 0), of(backward, 0, 0)
    return TickWork(
        forward,
        backward,
        embed=np.append(embed[1:], IDLE),
        head=of(backward if training else forward, S - 1, R - 1),
        embed_backward=np.insert(embed_backward[:-1], 0, IDLE),
    )


def loops(rows: TickWork) -> list[Loop]:
    """Returns the ticks of `rows` as a short list of loops, in order."""
    runs: list[tuple[Kind, int]] = []
    for kind in _kinds(rows):
        if runs and runs[-1][0] == kind:
            runs[-1] = kind, runs[-1][1] + 1
        else:
            runs.append((kind, 1))
    result = []
    while runs:
        # Interleaved schedules alternate ticks with and without work outside the stack.
        pair, times = runs[:2], 1
        while len(pair) == 2 and runs[2 * times : 2 * times + 2] == pair:
            times += 1
        repeated = pair if times > 1 else pair[:1]
        result.append(Loop(times, tuple(repeated)))
        runs = runs[times * len(repeated) :]
    return result


def _kinds(rows: TickWork) -> list[Kind]:
    kinds, S = [], rows.forward.shape[1]
    busy = [(table != IDLE).any(axis=(1, 2)).tolist() for table in rows[:2]]
    outside = [(table != IDLE).tolist() for table in rows[2:]]
    needed = list(map(Kind, *busy, *outside))
    # Idle work at a few ticks is cheaper than compiling another loop.
    pad_embed = sum(k[:3] == (True, False, False) for k in needed) <= 2 * S
    pad_backward = sum(k[:2] == (False, True) and not k[4] for k in needed) <= 2 * S
    for kind in needed:
        if kind.forward and kind.backward:
            # All work outside the stack or none: fewer kinds, so pairs can repeat.
            any_outside = any(kind[2:])
            kind = Kind(True, True, any_outside, any_outside, any_outside)
        elif kind.forward and pad_embed:
            kind = kind._replace(embed=True)
        elif kind.backward and pad_backward:
            kind = kind._replace(embed_backward=True)
        kinds.append(kind)
    return kinds
