"""Data for charts: smoothing, downsampling, and round axis ticks."""

import dataclasses
import math

import numpy as np

MAX_POINTS = 1500


def rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the centered mean of the finite values, NaN where a value is not finite.

    At the beginning, where a loss falls fast, the window shrinks on both sides, so that
    the curve does not lag. At the end it is truncated.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half = np.minimum(window // 2, index)
    low, high = index - half, np.minimum(index + half + 1, len(values))
    means = (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)
    return np.where(finite, means, np.nan)


def downsample(
    steps: np.ndarray, values: np.ndarray, max_points: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `max_points` points, including the extremes of every interval.

    An interval with non-finite values keeps one of them, as a gap.
    """
    if len(steps) <= max_points:
        return steps, values
    # At most three points per interval are kept, plus the two ends.
    edges = np.linspace(0, len(steps), (max_points - 2) // 3 + 1).astype(int)
    kept = {0, len(steps) - 1}
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        part = values[low:high]
        finite = np.flatnonzero(np.isfinite(part))
        if len(finite):
            kept.add(low + int(finite[np.argmin(part[finite])]))
            kept.add(low + int(finite[np.argmax(part[finite])]))
        if len(finite) < len(part):
            kept.add(low + int(np.argmin(np.isfinite(part))))
    index = np.array(sorted(kept))
    return steps[index], values[index]


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers (1, 2 or 5 times a power of ten) in range."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [round(i * distance, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns round numbers in a positive range, with roughly equal ratios."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [d * 10.0**e for e in decades for d in digits]
        ticks = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
        if len(ticks) <= 7:
            break
    if len(ticks) < 2:
        return [t for t in linear_ticks(low, high) if t > 0]
    return ticks[:: math.ceil(len(ticks) / 7)]


@dataclasses.dataclass(frozen=True)
class Axis:
    """Maps values to vertical positions in a chart."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def part(self, value: float) -> float:
        """Returns 0 at the top and 1 at the bottom, NaN for a value not on the axis."""
        if not self.log:
            return 1 - (value - self.low) / (self.high - self.low)
        if not value > 0:
            return math.nan
        return 1 - math.log(value / self.low) / math.log(self.high / self.low)


def value_axis(
    values: np.ndarray, *, from_zero: bool = False, log: bool = False
) -> Axis:
    """Returns an axis that covers all finite values with a small margin.

    A logarithmic axis covers the positive values; there must be at least one.
    """
    values = values[np.isfinite(values)]
    if log:
        values = values[values > 0]
        low, high = float(values.min()), float(values.max())
        room = max((high / low) ** 0.04, 1.01)
        low, high = low / room, high * room
        return Axis(low, high, log_ticks(low, high), log=True)
    if len(values) == 0:
        return Axis(0.0, 1.0, [0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    if from_zero:
        low = min(low, 0.0)
    room = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
    high += room
    if not from_zero or low < 0:
        low -= room
    return Axis(low, high, linear_ticks(low, high))
