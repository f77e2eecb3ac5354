"""How a step's time scales, as an SVG with two log axes; dashed lines are ideal."""

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from ....sharding.pipeline.picture import FONT, INK, PAPER, RULE, SHADES, SOFT
from ....sharding.text import seconds_text
from ...record.curves import Axis, value_axis
from .searching import Kind, Search

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 72, 40, 76, 60
COLORS: dict[Kind, str] = {
    "strong": SHADES["forward"][0],
    "weak": SHADES["backward"][0],
}
NAMES: dict[Kind, str] = {
    "strong": "same batch on all devices",
    "weak": "same batch for each device",
}


def svg(found: Mapping[Kind, Sequence[Search]], title: str) -> str:
    """Draws the picture; sizes on which nothing fits have no point."""
    curves: dict[Kind, list[tuple[int, float, Search]]] = {
        kind: [
            (point.target.num_devices, best.roofline.step, point)
            for point in points
            if (best := point.best_forecast)
        ]
        for kind, points in found.items()
    }
    all_points = [point for curve in curves.values() for point in curve]
    if not all_points:
        raise ValueError("--svg: nothing fits at any size, so there is nothing to draw")
    devices = sorted({num for num, _, _ in all_points})
    ideals = [_ideal(kind, curve) for kind, curve in curves.items() if curve]
    heights = [s for _, s, _ in all_points] + [s for line in ideals for _, s in line]
    axis = value_axis(np.array(heights), log=True)
    parts = [_frame(title, devices, axis)]
    for number, (kind, curve) in enumerate(curves.items()):
        parts.append(_legend(kind, number))
        if curve:
            parts.append(_line(_ideal(kind, curve), devices, axis, kind, dashed=True))
            line = [(num, seconds) for num, seconds, _ in curve]
            parts.append(_line(line, devices, axis, kind))
    # Text last, so that no line crosses it: above the upper curve, below the lower.
    upper: dict[int, float] = {}
    for num, seconds, _ in all_points:
        upper[num] = max(seconds, upper.get(num, 0.0))
    for kind, curve in curves.items():
        for num, seconds, point in curve:
            words = -9 if seconds == upper[num] else 17
            parts.append(_dot(point, _x(num, devices), _y(seconds, axis), kind, words))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="{escape(FONT)}" role="img" '
        f'aria-label="{escape(title)}">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _ideal(kind: Kind, curve: Sequence[tuple[int, float, Search]]) -> list:
    """Returns the curve of perfect scaling from the first point on."""
    first, seconds, _ = curve[0]
    falls = kind == "strong"
    return [(num, seconds * (first / num if falls else 1.0)) for num, _, _ in curve]


def _x(num: int, devices: Sequence[int]) -> float:
    low, high = math.log(devices[0]), math.log(devices[-1])
    part = (math.log(num) - low) / (high - low) if high > low else 0.5
    return LEFT + part * (WIDTH - LEFT - RIGHT)


def _y(seconds: float, axis: Axis) -> float:
    return TOP + axis.part(seconds) * (HEIGHT - TOP - BOTTOM)


def _frame(title: str, devices: Sequence[int], axis: Axis) -> str:
    parts = [_text(LEFT, 28, title, INK, size=16, weight=600)]
    for tick in axis.ticks:
        y = _y(tick, axis)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{RULE}"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, seconds_text(tick), SOFT, anchor="end"))
    for num in devices:
        x = _x(num, devices)
        parts.append(_text(x, HEIGHT - BOTTOM + 22, str(num), SOFT, anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    words = "devices; dashed: no loss; numbers: efficiency against the smallest"
    parts.append(_text(middle, HEIGHT - 12, words, SOFT, anchor="middle"))
    return "".join(parts)


def _legend(kind: Kind, number: int) -> str:
    x = LEFT + 270 * number
    return (
        f'<rect x="{x}" y="43" width="14" height="4" fill="{COLORS[kind]}"/>'
        f"{_text(x + 22, 50, f'step time, {NAMES[kind]}', INK)}"
    )


def _line(points, devices, axis: Axis, kind: Kind, *, dashed: bool = False) -> str:
    path = " ".join(f"{_x(n, devices):.1f},{_y(s, axis):.1f}" for n, s in points)
    style = (
        'stroke-width="1.2" stroke-dasharray="4 4"' if dashed else 'stroke-width="2"'
    )
    return f'<polyline points="{path}" fill="none" stroke="{COLORS[kind]}" {style}/>'


def _dot(point: Search, x: float, y: float, kind: Kind, words: int) -> str:
    """Draws a point, its efficiency `words` pixels below, or above if negative."""
    color, share = COLORS[kind], f"{point.efficiency:.0%}"
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'
    return dot + _text(x, y + words, share, color, anchor="middle", size=11)


def _text(
    x: float,
    y: float,
    words: str,
    color: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" '
        f'font-size="{size}" font-weight="{weight}" stroke="{PAPER}" stroke-width="3" '
        f'paint-order="stroke">{escape(words)}</text>'
    )
