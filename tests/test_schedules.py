"""Learning rates at the steps where they turn."""

import jax
import numpy as np
import pytest

from meshloom.trainer.schedules import Constant, WarmupCosine, WarmupStableDecay


def values(schedule, num_steps):
    return np.asarray(jax.vmap(schedule.make(num_steps))(np.arange(num_steps + 1)))


def test_constant():
    schedule = Constant(value=0.5).make(10)
    assert schedule(0) == schedule(9) == 0.5


def test_warmup_cosine():
    found = values(WarmupCosine(peak=2.0, warmup_steps=4, final_share=0.1), 20)
    steps = np.arange(21)
    turn = np.pi * (steps - 4) / 16
    cosine = 0.2 + (2.0 - 0.2) * 0.5 * (1 + np.cos(turn))
    expected = np.where(steps < 4, 2.0 * steps / 4, cosine)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.argmax() == 4


def test_cosine_without_warmup_starts_at_the_peak():
    found = values(WarmupCosine(peak=2.0), 10)
    np.testing.assert_allclose(found[[0, 10]], [2.0, 0.2], rtol=1e-6)


def test_warmup_stable_decay():
    found = values(
        WarmupStableDecay(peak=1.0, warmup_steps=2, decay_steps=4, final_share=0.5), 10
    )
    expected = [0, 0.5, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_stable_part_may_be_empty():
    found = values(WarmupStableDecay(peak=1.0, warmup_steps=5, decay_steps=5), 10)
    assert found.argmax() == 5
    np.testing.assert_allclose(found[[5, 10]], [1.0, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (WarmupCosine(peak=1.0, warmup_steps=11), "take 12 steps.*the run has 10"),
        (WarmupCosine(peak=1.0, warmup_steps=10), "take 11 steps.*the run has 10"),
        (
            WarmupStableDecay(peak=1.0, warmup_steps=6, decay_steps=5),
            "take 11 steps.*the run has 10.*raise num_steps",
        ),
    ],
)
def test_longer_than_the_run(schedule, message):
    with pytest.raises(ValueError, match=message):
        schedule.make(10)
