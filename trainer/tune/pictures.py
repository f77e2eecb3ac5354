"""The pictures of a search as inline SVG: learning curves, parallel coordinates."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from ...sharding.text import short_number
from ..record.curves import Axis, linear_ticks, value_axis

WIDTH, HEIGHT = 1000, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 16, 34
# Long names of settings would overlap those of their neighbors.
MAX_NAME = 26


@dataclasses.dataclass(frozen=True)
class Line:
    """One trial in a picture.

    Attributes:
      number: of the trial.
      kind: "best", "complete" or "other"; the last two differ in color only.
      settings: {name: value as text}.
      curve: {step: held-out value}.
      value: at the end; None for a trial that was stopped early or failed.
    """

    number: int
    kind: str
    settings: Mapping[str, str]
    curve: Mapping[int, float]
    value: float | None


_STROKES = {
    "best": "stroke:var(--eval);stroke-width:3",
    "complete": "stroke:var(--main);stroke-width:1.5",
    "other": "stroke:var(--raw);stroke-width:1",
}
# With an outline in the color of the page, to be read where lines cross it.
_TEXT = (
    "fill:var(--soft);font-size:13px;paint-order:stroke;stroke:var(--paper);"
    "stroke-width:4px"
)


def learning_curves(lines: Sequence[Line], metric: str) -> str:
    """Returns all curves over the steps; "" if there is no evaluation."""
    points = [(s, v) for line in lines for s, v in line.curve.items() if _finite(v)]
    if not points:
        return ""
    last = max(step for step, _ in points)
    axis = value_axis(np.array([value for _, value in points]))
    parts = [_grid(axis), _steps(last)]
    for line in _best_last(lines):
        at = [
            (_x(step / max(last, 1)), _y(axis, value))
            for step, value in sorted(line.curve.items())
            if _finite(value)
        ]
        parts.append(_path(line, at))
    return _svg(f"Held-out {metric} of each trial over its steps", parts)


def parallel_coordinates(lines: Sequence[Line], metric: str) -> str:
    """Returns one vertical axis per setting and one for the result."""
    done = [line for line in lines if line.value is not None and _finite(line.value)]
    if len(done) < 2:
        return ""
    names = list(done[0].settings)
    axes = [_SettingAxis([line.settings[name] for line in done]) for name in names]
    result = value_axis(np.array([line.value for line in done], float))
    columns = [_x(i / len(names)) for i in range(len(names) + 1)]
    parts, labels = [_upright(x) for x in columns], []
    for x, name, axis in zip(columns, names, axes, strict=False):
        labels += [_label(x, TOP - 4, _short(name)), *axis.labels(x)]
    labels.append(_label(columns[-1], TOP - 4, metric, "end"))
    for tick in result.ticks:
        y = _y(result, tick) + 4
        labels.append(_label(columns[-1] - 6, y, short_number(tick), "end"))
    for line in _best_last(done):
        assert line.value is not None
        at = [
            (x, axis.y(line.settings[name]))
            for x, name, axis in zip(columns, names, axes, strict=False)
        ]
        parts.append(_path(line, [*at, (columns[-1], _y(result, line.value))]))
    title = f"Settings and {metric} of the finished trials"
    return _svg(title, [*parts, *labels], inset=True)


class _SettingAxis:
    """Positions of a setting's values: numbers to scale, others side by side."""

    def __init__(self, texts: Sequence[str]):
        numbers = [_number(text) for text in texts]
        self._axis: Axis | None = None
        self._names = sorted(set(texts))
        found = [number for number in numbers if number is not None]
        if len(found) == len(texts) and len(set(found)) > 1:
            low, high = min(found), max(found)
            is_log = low > 0 and high / low > 20
            self._axis = value_axis(np.array(found), log=is_log)

    def y(self, text: str) -> float:
        if self._axis is not None:
            number = _number(text)
            assert number is not None
            return _y(self._axis, number)
        place = (self._names.index(text) + 0.5) / len(self._names)
        return TOP + place * (HEIGHT - TOP - BOTTOM)

    def labels(self, x: float) -> list[str]:
        if self._axis is None:
            return [_label(x + 5, self.y(n) - 3, _short(n)) for n in self._names]
        return [
            _label(x + 5, _y(self._axis, tick) + 4, short_number(tick))
            for tick in self._axis.ticks
        ]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _best_last(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines in the order of drawing: the last one covers the others."""
    order = ("other", "complete", "best")
    return sorted(lines, key=lambda line: order.index(line.kind))


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}"


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return TOP + axis.part(value) * (HEIGHT - TOP - BOTTOM)


def _path(line: Line, points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return ""
    where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    text = ", ".join(f"{name}={value}" for name, value in line.settings.items())
    title = f"trial {line.number}: {text}"
    style = f"fill:none;{_STROKES[line.kind]}"
    # A trial with a single evaluation is a dot.
    if len(points) == 1:
        (x, y) = points[0]
        where = f"{x:.1f},{y:.1f} {x + 0.1:.1f},{y:.1f}"
        style += ";stroke-width:5;stroke-linecap:round"
    return (
        f'<polyline points="{where}" style="{style}">'
        f"<title>{escape(title)}</title></polyline>"
    )


def _grid(axis: Axis) -> str:
    parts = []
    for tick in axis.ticks:
        y = _y(axis, tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/>'
        )
        parts.append(_label(LEFT - 8, y + 4, short_number(tick), "end"))
    return "".join(parts)


def _steps(last: int) -> str:
    return "".join(
        _label(_x(tick / max(last, 1)), HEIGHT - 10, short_number(tick), "middle")
        for tick in linear_ticks(0, last)
    )


def _upright(x: float) -> str:
    bottom = HEIGHT - BOTTOM
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" '
        'style="stroke:var(--rule);stroke-width:1.5"/>'
    )


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{_TEXT}">'
        f"{escape(text)}</text>"
    )


def _svg(title: str, parts: Sequence[str], *, inset: bool = False) -> str:
    left = LEFT - 10 if inset else 0
    return (
        f'<div class="schedule"><svg viewBox="{left} 0 {WIDTH - left} {HEIGHT}" '
        f'role="img" style="width:100%;min-width:40rem"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg></div>"
    )
