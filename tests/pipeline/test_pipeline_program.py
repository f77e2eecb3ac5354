"""The compiled program follows the schedule in its loops, FLOPs and memory."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import GPT, LENGTH, Case
from toy_stack import Classifier

from meshloom.sharding import hlo
from meshloom.sharding.pipeline import make, simulate
from meshloom.sharding.pipeline.loops import Kind, Loop, loops, rows
from meshloom.sharding.pipeline.schedule import IDLE
from meshloom.sharding.pipeline.ticks import Ticks

pytestmark = pytest.mark.compiles_anew

replace = dataclasses.replace
SCHEDULES = ("gpipe", "1f1b", "interleaved")
FEED = Kind(False, False, True, False, False)
FORWARD = Kind(True, False, True, False, False)
TURN = Kind(False, True, False, True, True)
BOTH = Kind(True, True, True, True, True)
BLOCKS_ONLY = Kind(True, True, False, False, False)
BACKWARD = Kind(False, True, False, False, True)
LEAVE = Kind(False, False, False, False, True)


def one(kind: Kind, length: int) -> Loop:
    return Loop(1, ((kind, length),))


@pytest.mark.parametrize(
    ("name", "S", "M", "R", "expected"),
    [
        ("gpipe", 4, 8, None, [(FORWARD, 11), (TURN, 8), (BACKWARD, 3)]),
        ("1f1b", 4, 8, None, [(FORWARD, 3), (BOTH, 8), (BACKWARD, 3)]),
        ("1f1b", 4, 2, None, [(FORWARD, 3), (BOTH, 2), (BACKWARD, 3)]),
        ("interleaved", 4, 4, 2, [(FORWARD, 7), (BOTH, 4), (BACKWARD, 7)]),
    ],
)
def test_a_schedule_becomes_few_loops(name, S, M, R, expected):
    result = loops(rows(make(name, S, M, R), training=True))
    middle = [one(kind, length) for kind, length in expected]
    assert result == [one(FEED, 1), *middle, one(LEAVE, 1)]


def test_groups_of_interleaved_microbatches_become_one_nested_loop():
    groups = Loop(3, ((BOTH, 2), (BLOCKS_ONLY, 2)))
    result = loops(rows(make("interleaved", 2, 8, 2), training=True))
    ends = [one(FORWARD, 3), groups, one(BOTH, 2), one(BACKWARD, 3)]
    assert result == [one(FEED, 1), *ends, one(LEAVE, 1)]


def test_many_ticks_without_work_outside_get_their_own_loops():
    result = loops(rows(make("interleaved", 4, 8, 8), training=True))
    begin = [one(FEED, 1), one(FORWARD, 3), one(FORWARD._replace(embed=False), 28)]
    middle = [one(BOTH, 4), one(BLOCKS_ONLY, 28), one(BOTH, 4)]
    end = [one(BACKWARD._replace(embed_backward=False), 28), one(BACKWARD, 3)]
    assert result == [*begin, *middle, *end, one(LEAVE, 1)]


def test_evaluation_runs_only_forwards():
    result = loops(rows(make("1f1b", 4, 8), training=False))
    head, nothing = FORWARD._replace(head=True), FEED._replace(embed=False)
    assert result == [one(FEED, 1), one(FORWARD, 3), one(head, 8), one(nothing, 1)]


class Recorder(Ticks):
    """Ticks that only record their rows."""

    def __init__(self):
        self.seen: list[tuple[int, Kind]] = []

    def _tick(self, kind, carry, row):
        self.seen.append((int(row), kind))
        return carry, None


SIZES = list(itertools.product(SCHEDULES, (2, 4), (1, 2, 3, 5, 8, 13)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "S", "M"), SIZES)
def test_every_row_is_visited_once_and_in_order(name, S, M, training):
    table = rows(make(name, S, M), training=training)
    recorder, start = Recorder(), 0
    with jax.disable_jit():
        for loop in loops(table):
            stop = start + loop.num_ticks
            recorder.loop(loop, {}, jnp.arange(start, stop))  # pyright: ignore
            start = stop
    assert [number for number, _ in recorder.seen] == list(range(len(table.head)))
    for number, kind in recorder.seen:
        real = [bool(np.any(part[number] != IDLE)) for part in table]
        # All scheduled work is done, and no other forwards or backwards.
        assert all(
            does or not is_real for does, is_real in zip(kind, real, strict=True)
        )
        assert list(kind[:2]) == real[:2]


# In a chunk of one layer, the compiler removes the recomputation.
WIDE = Classifier(num_layers=16, width=64, num_hidden=96)


def parts(case: Case) -> tuple[int, int]:
    """Returns the number of devices that share the rows, and the weights."""
    shape = case.pipeline.mesh.shape
    return shape["data"] * shape["fsdp"], shape["tensor"]


def toy_flops(case: Case) -> float:
    """Returns the FLOPs of matmuls on one device, according to the simulator."""
    m, schedule = case.model, case.pipeline.schedule
    ways, tensor = parts(case)
    M, S = schedule.num_microbatches, schedule.num_stages
    num_rows = case.num_rows // M // ways
    forward = m.num_layers * num_rows * 4 * m.width * m.num_hidden / S / tensor
    sim = simulate(schedule, remat=m.remat)
    # The second matmul of a layer comes last, so it is never recomputed.
    saved = 0.5 if m.remat == "full" else 0.0
    blocks = sim.ratio * M * (sim.ideal / M - saved) * forward
    head = 3 * 2 * num_rows * m.width * m.num_classes / tensor
    embed = 2 * 2 * num_rows * m.side**2 * m.width  # pixels have no gradient
    return blocks + M * (head + embed) / S


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("gpipe", "save-dots"),
        ("1f1b", "save-dots"),
        ("1f1b", "full"),
        ("interleaved", "save-dots"),
        ("interleaved", "none"),
    ],
)
def test_executed_flops_match_the_simulator(name, remat):
    case = Case(
        model=replace(WIDE, remat=remat),
        mesh="pipe=4",
        schedule=name,
        num_microbatches=8,
        num_rows=64,
    )
    result = hlo.flops(case.compile().as_text())
    assert result == pytest.approx(toy_flops(case), rel=0.01)


def gpt_flops(case: Case) -> float:
    m, schedule = case.model, case.pipeline.schedule
    ways, tensor = parts(case)
    M, S = schedule.num_microbatches, schedule.num_stages
    tokens = case.num_rows // M // ways * LENGTH
    heads = m.head_width * m.num_heads
    scores = 2 * tokens * LENGTH * heads  # and as many for the product with the values
    down = 2 * tokens * m.d_model * m.d_ff
    forward = 2 * tokens * m.d_model * 4 * heads + 2 * down + 2 * scores
    again = {"save-named": scores, "save-dots": 2 * scores, "full": forward - down}
    sim = simulate(schedule, remat=m.remat)
    layer = 4 * forward + again[m.remat]
    blocks = sim.ratio * M * m.num_layers * layer / S / tensor
    return blocks + M * 3 * 2 * tokens * m.d_model * m.padded_vocab / S / tensor


@pytest.mark.parametrize(
    ("name", "mesh", "remat", "M"),
    [
        ("gpipe", "pipe=2", "save-named", 4),
        ("1f1b", "pipe=2,data=2,tensor=2", "save-dots", 4),
        ("interleaved", "pipe=2,fsdp=2,tensor=2", "full", 2),
    ],
)
def test_executed_flops_of_a_transformer_match_the_simulator(name, mesh, remat, M):
    model = replace(GPT, remat=remat)
    case = Case(model=model, mesh=mesh, schedule=name, num_microbatches=M)
    result = hlo.flops(case.compile().as_text())
    assert result == pytest.approx(gpt_flops(case), rel=0.01)


# Narrow layers, so that saved inputs outweigh the weights.
SAVED = Classifier(width=256, num_hidden=32)
ROWS = 32


def temporaries(name: str, num_microbatches: int, model=SAVED, mesh="pipe=4") -> int:
    case = Case(
        model=model,
        mesh=mesh,
        schedule=name,
        num_microbatches=num_microbatches,
        num_rows=ROWS * num_microbatches,
    )
    return case.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("remat", ["save-dots", "none"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_temporaries_do_not_grow_with_the_microbatches(name, remat):
    model = replace(SAVED, remat=remat)
    few, many = (temporaries(name, M, model) for M in (8, 32))
    assert many <= 1.05 * few


def test_temporaries_of_a_transformer_do_not_grow_with_the_microbatches():
    model, mesh = replace(GPT, d_model=64), "pipe=2,fsdp=2,tensor=2"
    few, many = (temporaries("1f1b", M, model, mesh) for M in (8, 32))
    assert many <= 1.05 * few


def test_temporaries_of_gpipe_grow_by_the_saved_inputs():
    few, many = (temporaries("gpipe", M) for M in (8, 32))
    saved = ROWS * SAVED.width * 4
    assert many - few == pytest.approx((32 - 8) * saved, rel=0.01)
    assert many > 2 * few
