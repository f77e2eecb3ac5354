"""Confidence intervals of metrics that are ratios of sums, by bootstrap over groups.

The sums of groups of examples are drawn with replacement, as many groups as there are,
and every draw gives a value of each metric. An interval holds the middle LEVEL of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

DRAWS, LEVEL, SEED = 2000, 0.95, 0
# With fewer, the draws are too alike for their quantiles to mean anything.
MIN_GROUPS = 20
MAX_GROUPS = 200

Interval = tuple[float, float]


def intervals(
    groups: Sequence[Mapping[str, float]],
    means: Callable[[Mapping[str, float]], Mapping[str, float]],
) -> dict[str, Interval | None]:
    """Returns the interval of every metric; None if a draw has no finite value.

    Args:
      groups: the sums of each group of examples.
      means: computes the metrics from sums.
    """
    if len(groups) < MIN_GROUPS:
        raise ValueError(
            f"a bootstrap needs >= {MIN_GROUPS} groups of examples, got {len(groups)}"
        )
    names = list(groups[0])
    sums = np.array([[group[name] for name in names] for group in groups], np.float64)
    number = len(groups)
    counts = np.random.default_rng(SEED).multinomial(
        number, np.full(number, 1 / number), size=DRAWS
    )
    with np.errstate(invalid="ignore", over="ignore"):
        drawn = counts @ sums
    rows = [_means(dict(zip(names, row, strict=True)), means) for row in drawn.tolist()]
    return {name: _interval([row.get(name) for row in rows]) for name in rows[0]}


def _means(sums: dict[str, float], means: Callable[..., Any]) -> Mapping[str, float]:
    # A draw of nothing but padding and weights of 0 has no mean.
    return means(sums) if sums["weight"] else means(dict.fromkeys(sums, math.nan))


def _interval(values: Sequence[float | None]) -> Interval | None:
    found = [math.nan if value is None else value for value in values]
    if not np.isfinite(found).all():
        return None
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(found, [tail, 1 - tail]).tolist()
    return low, high
