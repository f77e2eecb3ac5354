"""A run may be extended if its learning rate does not jump."""

import dataclasses
import io

import jax
import npz_rows
import numpy as np
import pytest
from rich.console import Console

from meshloom.sharding import MeshSpec
from meshloom.trainer.config.tree import Change
from meshloom.trainer.program import schedules
from meshloom.trainer.record import metrics
from meshloom.trainer.run import extending, train

CONSTANT = schedules.Constant(value=0.1)
COSINE = schedules.WarmupCosine(peak=0.1, warmup_share=0.1)
STABLE = schedules.WarmupStableDecay(peak=0.1, decay_share=0.2)
WARM = schedules.WarmupStableDecay(peak=0.1, decay_share=0.2, warmup_share=0.1)


def check(schedule, done, *, old=100, new=200, insist=False):
    changes = [Change("mesh.data", 1, 2), Change("num_steps", old, new)]
    return extending.check(changes, schedule, done, insist=insist)


@pytest.mark.parametrize(
    "schedule, done",
    [(CONSTANT, 100), (STABLE, 80), (COSINE, None), (COSINE, 0)],
)
def test_updates_so_far_are_the_same(schedule, done):
    lines = check(schedule, done)
    assert lines == (
        [f"num_steps 100 -> 200: the {done} updates so far are the same in both"]
        if done
        else []
    )


def test_the_same_number_of_steps():
    assert extending.check([], COSINE, 50, insist=False) == []


def test_a_warmup_that_would_have_been_longer_is_reported():
    (line,) = check(WARM, 80)
    assert line == (
        "num_steps 100 -> 200: 19 of the 80 updates so far would have had another "
        "learning rate in a run of 200 steps; training continues with 0.1"
    )
    with pytest.raises(ValueError, match="WarmupStableDecay spreads"):
        check(WARM, 15)  # the longer warmup would still be under way


@pytest.mark.parametrize("schedule, done", [(COSINE, 60), (COSINE, 100), (STABLE, 82)])
def test_a_jump_is_refused_with_what_would_change(schedule, done):
    with pytest.raises(ValueError) as caught:
        check(schedule, done)
    rates = [schedule.make(num) for num in (100, 200)]
    last, after = float(rates[0](done - 1)), float(rates[1](done))
    message = str(caught.value)
    assert f"the last had {last:.3g}, the next would have {after:.3g}" in message
    assert "pass --insist" in message and "init_from" in message
    (line,) = check(schedule, done, insist=True)
    assert "the next would have" in line


def test_fewer_steps_follow_the_same_rule():
    """A stable phase may end sooner, but not in the past."""
    assert check(STABLE, 70, old=200, new=100)
    with pytest.raises(ValueError, match="num_steps 200 -> 100"):
        check(STABLE, 90, old=200, new=100)


def run(config, folder):
    console = Console(file=io.StringIO(), width=300)
    state = train.train(config, workdir=folder, console=console)
    return state, console.file.getvalue()  # type: ignore


def test_an_extended_run_equals_the_longer_run_bit_for_bit(tmp_path):
    """Parameters sharded four ways."""
    path = npz_rows.write(tmp_path / "rows.npz")
    long = npz_rows.config(path, mesh=MeshSpec(data=2, fsdp=4), num_steps=12)
    expected, _ = run(long, tmp_path / "straight")
    short = dataclasses.replace(long, num_steps=8)
    run(short, tmp_path / "run")
    state, output = run(long, tmp_path / "run")
    assert "num_steps 8 -> 12: the 8 updates so far are the same in both" in output
    assert "Resuming from step 8" in output
    assert state.params["w"].addressable_shards[0].data.shape == (2, 4)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    losses = (
        [row["loss"] for row in metrics.read(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "straight")
    )
    assert next(losses) == next(losses)


def test_a_cosine_run_cannot_be_extended(tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz")
    config = npz_rows.config(path, schedule=COSINE)
    run(config, tmp_path / "run")
    with pytest.raises(ValueError, match="num_steps 8 -> 12: WarmupCosine spreads"):
        run(dataclasses.replace(config, num_steps=12), tmp_path / "run")
