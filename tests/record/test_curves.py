"""Tests of the data and lines of a report's charts."""

import json
import re

import numpy as np
import pytest

from meshloom.trainer.record import curves
from meshloom.trainer.report import charts


def test_downsample_keeps_extremes_gaps_and_ends():
    steps = np.arange(100_000)
    values = np.sin(steps / 3000.0)
    values[31_415], values[77_777], values[50_000] = 9.0, -9.0, np.nan
    kept_steps, kept = curves.downsample(steps, values)
    assert len(kept) <= curves.MAX_POINTS
    assert (kept_steps[0], kept_steps[-1]) == (0, 99_999)
    assert np.all(np.diff(kept_steps) > 0)
    assert {31_415, 77_777, 50_000} <= set(kept_steps.tolist())
    np.testing.assert_array_equal(kept, values[kept_steps])
    short = curves.downsample(steps[:1500], values[:1500])[0]
    assert len(short) == 1500


def test_rolling_mean_has_no_lag_and_leaves_gaps():
    falling = 100.0 - np.arange(50)
    smooth = curves.rolling_mean(falling, 11)
    # A straight line is its own centered mean, except where the window is truncated.
    np.testing.assert_allclose(smooth[:45], falling[:45], rtol=1e-12)
    values = np.array([1.0, 2.0, np.nan, 4.0, 6.0, 8.0])
    np.testing.assert_allclose(
        curves.rolling_mean(values, 3), [1.0, 1.5, np.nan, 5.0, 6.0, 7.0]
    )


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 3000, [0, 1000, 2000, 3000]),
        (0, 3e-4, [0, 1e-4, 2e-4, 3e-4]),
        (1.2, 7.4, [2, 4, 6]),
        (5, 5, [5]),
    ],
)
def test_linear_ticks_are_round(low, high, ticks):
    assert curves.linear_ticks(low, high) == pytest.approx(ticks)


def test_log_ticks_are_few_and_inside():
    assert curves.log_ticks(0.09, 11) == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10])
    assert len(curves.log_ticks(1e-9, 1e9)) <= 7
    assert len(curves.log_ticks(1.21, 1.29)) >= 2


def test_a_value_that_is_not_finite_breaks_the_line():
    values = np.array([1.0, 2.0, np.nan, 3.0, np.inf, 4.0])
    curve = charts.Curve(
        label="loss", style="mean", steps=np.arange(1, 7), values=values
    )
    text = charts.render(
        charts.Chart(name="a", title="A", curves=(curve,), last_step=6)
    )
    (path,) = re.findall(r'<path class="curve mean" d="([^"]*)"', text)
    assert path.count("M") == 3 and path.count("L") == 1
    assert text.count('class="gap"') == 2
    assert json.loads(re.findall(r"json\">(.*?)</script>", text)[0])["curves"][0][
        "values"
    ] == [1.0, 2.0, None, 3.0, None, 4.0]
