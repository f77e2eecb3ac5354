"""A run gets more steps where its learning rate goes on without a jump."""

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
from meshloom.trainer.run import prolonging, train

CONSTANT = schedules.Constant(value=0.1)
COSINE = schedules.WarmupCosine(peak=0.1, warmup_share=0.1)
STABLE = schedules.WarmupStableDecay(peak=0.1, decay_share=0.2)
WARM = schedules.WarmupStableDecay(peak=0.1, decay_share=0.2, warmup_share=0.1)


def said(schedule, done, *, old=100, new=200, insist=False):
    changes = [Change("mesh.data", 1, 2), Change("num_steps", old, new)]
    return prolonging.check(changes, schedule, done, insist=insist)


@pytest.mark.parametrize(
    "schedule, done",
    [(CONSTANT, 100), (STABLE, 80), (COSINE, None), (COSINE, 0)],
)
def test_what_no_update_would_notice(schedule, done):
    lines = said(schedule, done)
    assert lines == (
        [f"num_steps 100 -> 200: the {done} updates done are the same in both"]
        if done
        else []
    )


def test_nothing_to_say_of_the_same_number():
    assert prolonging.check([], COSINE, 50, insist=False) == []


def test_a_warm_up_that_would_have_been_longer_is_said():
    (line,) = said(WARM, 80)
    assert line == (
        "num_steps 100 -> 200: of the 80 updates done, 19 would have had another "
        "learning rate in a run of 200 steps; it goes on with 0.1"
    )
    with pytest.raises(ValueError, match="WarmupStableDecay spreads"):
        said(WARM, 15)  # the longer warm-up would still go on


@pytest.mark.parametrize("schedule, done", [(COSINE, 60), (COSINE, 100), (STABLE, 82)])
def test_a_jump_is_refused_with_what_would_change(schedule, done):
    with pytest.raises(ValueError) as caught:
        said(schedule, done)
    rates = [schedule.make(num) for num in (100, 200)]
    last, after = float(rates[0](done - 1)), float(rates[1](done))
    words = str(caught.value)
    assert f"the last had {last:.3g}, the next would have {after:.3g}" in words
    assert "pass --insist" in words and "init_from" in words
    (line,) = said(schedule, done, insist=True)
    assert "the next would have" in line


def test_decaying_earlier_is_the_same_rule():
    """Fewer steps: a stable phase may end sooner, but not in the past."""
    assert said(STABLE, 70, old=200, new=100)
    with pytest.raises(ValueError, match="num_steps 200 -> 100"):
        said(STABLE, 90, old=200, new=100)


def run(config, folder):
    console = Console(file=io.StringIO(), width=300)
    state = train.train(config, workdir=folder, console=console)
    return state, console.file.getvalue()  # type: ignore


def test_a_prolonged_run_is_the_longer_run_bit_for_bit(tmp_path):
    """Parameters sharded four ways."""
    path = npz_rows.write(tmp_path / "rows.npz")
    long = npz_rows.config(path, mesh=MeshSpec(data=2, fsdp=4), num_steps=12)
    expected, _ = run(long, tmp_path / "straight")
    short = dataclasses.replace(long, num_steps=8)
    run(short, tmp_path / "run")
    state, output = run(long, tmp_path / "run")
    assert "num_steps 8 -> 12: the 8 updates done are the same in both" in output
    assert "Resuming from step 8" in output
    assert state.params["w"].addressable_shards[0].data.shape == (2, 4)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    losses = (
        [row["loss"] for row in metrics.read(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "straight")
    )
    assert next(losses) == next(losses)


def test_a_cosine_run_is_not(tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz")
    config = npz_rows.config(path, schedule=COSINE)
    run(config, tmp_path / "run")
    with pytest.raises(ValueError, match="num_steps 8 -> 12: WarmupCosine spreads"):
        run(dataclasses.replace(config, num_steps=12), tmp_path / "run")
