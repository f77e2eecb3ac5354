"""A schedule as loops: ticks that do the same kinds of work are one scan.

Beside the forwards and backwards of the table there is work outside the stack, which
all stages share. It is timed so that in a steady phase all of it falls into the same
ticks: a microbatch is embedded one tick before stage 0 takes it, and the gradient that
leaves stage 0 is brought to the embedding one tick later. So the rows run from one
tick before the table to one after it.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .schedule import IDLE, Schedule


class Kind(NamedTuple):
    """What is done at a tick, by every stage."""

    forward: bool
    backward: bool
    embed: bool  # for the next tick's forward on stage 0
    head: bool  # of the backward on the last stage, or of its forward in evaluation
    embed_backward: bool  # of the tick before's backward on stage 0


class Rows(NamedTuple):
    """What each tick works on; [tick, ...], IDLE where nothing. Of numpy or jax.

    Attributes:
      forward: [tick, stage, (microbatch, chunk, slot)]
      backward: the same
      embed, head, embed_backward: [tick], the microbatch.
    """

    forward: Any
    backward: Any
    embed: Any
    head: Any
    embed_backward: Any


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs of equal ticks, one after the other, and that `times` times."""

    times: int
    runs: tuple[tuple[Kind, int], ...]

    @property
    def num_ticks(self) -> int:
        return self.times * sum(length for _, length in self.runs)


def rows(schedule: Schedule, *, training: bool) -> Rows:
    """The rows of a schedule; without `training`, of its forwards alone."""
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
    return Rows(
        forward,
        backward,
        embed=np.append(embed[1:], IDLE),
        head=of(backward if training else forward, S - 1, R - 1),
        embed_backward=np.insert(embed_backward[:-1], 0, IDLE),
    )


def loops(rows: Rows) -> list[Loop]:
    """The ticks of `rows` as few loops, in order."""
    runs: list[tuple[Kind, int]] = []
    for kind in _kinds(rows):
        if runs and runs[-1][0] == kind:
            runs[-1] = kind, runs[-1][1] + 1
        else:
            runs.append((kind, 1))
    result = []
    while runs:
        # Interleaved microbatches come in groups, each with and without work outside.
        pair, times = runs[:2], 1
        while len(pair) == 2 and runs[2 * times : 2 * times + 2] == pair:
            times += 1
        taken = pair if times > 1 else pair[:1]
        result.append(Loop(times, tuple(taken)))
        runs = runs[times * len(taken) :]
    return result


def _kinds(rows: Rows) -> list[Kind]:
    kinds, S = [], rows.forward.shape[1]
    busy = [(table != IDLE).any(axis=(1, 2)).tolist() for table in rows[:2]]
    outside = [(table != IDLE).tolist() for table in rows[2:]]
    found = list(map(Kind, *busy, *outside))
    # Work for no microbatch, at a few ticks, is cheaper than another loop to compile.
    feeds = sum(k[:3] == (True, False, False) for k in found) <= 2 * S
    leaves = sum(k[:2] == (False, True) and not k[4] for k in found) <= 2 * S
    for does in found:
        if does.forward and does.backward:
            # All of it or none: fewer kinds, which may be one loop of pairs.
            any_outside = any(does[2:])
            does = Kind(True, True, any_outside, any_outside, any_outside)
        elif does.forward and feeds:
            does = does._replace(embed=True)
        elif does.backward and leaves:
            does = does._replace(embed_backward=True)
        kinds.append(does)
    return kinds
