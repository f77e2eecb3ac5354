"""Tests of learning rates at the boundaries of their phases."""

import jax
import numpy as np
import pytest

from meshloom.trainer.program.schedules import Constant, WarmupCosine, WarmupStableDecay


def values(schedule, num_steps):
    return np.asarray(jax.vmap(schedule.make(num_steps))(np.arange(num_steps + 1)))


def test_constant():
    schedule = Constant(value=0.5).make(10)
    assert schedule(0) == schedule(9) == 0.5


def test_warmup_cosine():
    found = values(WarmupCosine(peak=2.0, warmup_share=0.2, final_share=0.1), 20)
    steps = np.arange(21)
    turn = np.pi * (steps - 4) / 16
    cosine = 0.2 + (2.0 - 0.2) * 0.5 * (1 + np.cos(turn))
    expected = np.where(steps < 4, 2.0 * (steps + 1) / 4, cosine)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_cosine_without_warmup_starts_at_the_peak():
    found = values(WarmupCosine(peak=2.0), 10)
    np.testing.assert_allclose(found[[0, 10]], [2.0, 0.2], rtol=1e-6)


def test_warmup_stable_decay():
    schedule = WarmupStableDecay(
        peak=1.0, warmup_share=0.2, decay_share=0.4, final_share=0.5
    )
    expected = [0.5, 1, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5]
    np.testing.assert_allclose(values(schedule, 10), expected, rtol=1e-6)


def test_stable_part_may_be_empty():
    schedule = WarmupStableDecay(peak=1.0, warmup_share=0.5, decay_share=0.5)
    found = values(schedule, 10)
    np.testing.assert_allclose(found[[4, 5, 10]], [1.0, 1.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "schedule",
    [
        WarmupCosine(peak=1.0, warmup_share=0.5),
        WarmupCosine(peak=1.0, warmup_share=1.0),
        WarmupStableDecay(peak=1.0, warmup_share=0.5, decay_share=0.5),
    ],
)
def test_a_run_of_any_length_has_a_schedule(schedule, num_steps):
    found = values(schedule, num_steps)[:-1]
    assert np.all(found > 0) and np.all(found <= 1)


@pytest.mark.parametrize("shares", [{"warmup_share": -0.1}, {"warmup_share": 1.1}])
def test_impossible_shares(shares):
    with pytest.raises(
        ValueError, match="WarmupCosine: warmup_share=.* with a sum <= 1"
    ):
        WarmupCosine(peak=1.0, **shares)
    with pytest.raises(ValueError, match="WarmupStableDecay.*decay_share=0.5"):
        WarmupStableDecay(peak=1.0, warmup_share=0.6, decay_share=0.5)
