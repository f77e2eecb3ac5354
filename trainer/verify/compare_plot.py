"""The comparison of modes as a table and as a plot."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Protocol

from ...sharding.text import align, human_bytes, seconds_text
from .compare import Point, Result

COLORS = (
    *("#1f2328", "#14605c", "#a8430f", "#3d5a98", "#b8860b"),
    *("#7a3b8f", "#2f8f4e", "#c2417c", "#5b7083"),
)
PAPER, RULE, INK, SOFT = "#fbfaf7", "#dedad0", "#1f2328", "#69707a"
FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif"
# Pixels.
MARGIN, LEFT, PANEL, HEIGHT, TOP, BETWEEN = 24, 40, 420, 260, 74, 60


class Curve(Protocol):
    """What is plotted of one mode."""

    @property
    def mode(self) -> str: ...

    @property
    def points(self) -> Sequence[Point]: ...


def table(results: Sequence[Result]) -> str:
    """Returns the comparison as aligned text."""
    head = "mode|samples|held-out loss|time|to 1.05 x sync's loss|distance to sync"
    rows = [[*head.split("|"), "a learner moves", "commits", "dropped"]]
    for result in results:
        outcome, target = result.outcome, result.seconds_to_target
        rows.append(
            [
                result.mode,
                str(result.points[-1].samples),
                f"{result.points[-1].loss:.4f}",
                seconds_text(outcome.seconds),
                "not reached" if target is None else seconds_text(target),
                f"{result.distance:.3f}",
                human_bytes(result.bytes_per_learner),
                str(outcome.num_commits),
                str(outcome.num_dropped),
            ]
        )
    return align(rows, right=range(1, len(rows[0])))


def svg(results: Sequence[Curve], clock: str = "simulated seconds") -> str:
    """Returns the held-out loss over samples and over time.

    Args:
      clock: what the seconds of a point are.
    """
    width = 2 * (MARGIN + LEFT + PANEL) + BETWEEN - LEFT
    height = TOP + HEIGHT + 50 + 20 * math.ceil(len(results) / 4) + MARGIN
    title = "Held-out loss of the shared parameters"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img" '
        f'aria-label="{title}">',
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" '
        f'fill="{PAPER}" stroke="{RULE}"/>',
        f'<text x="{MARGIN}" y="36" font-size="17" font-weight="600" fill="{INK}">'
        f"{title}</text>",
        _panel(results, MARGIN + LEFT, "samples", lambda point: point.samples),
        _panel(
            results,
            MARGIN + LEFT + PANEL + BETWEEN,
            clock,
            lambda point: point.seconds,
        ),
    ]
    for index, result in enumerate(results):
        x = MARGIN + LEFT + 220 * (index % 4)
        y = TOP + HEIGHT + 62 + 20 * (index // 4)
        color = COLORS[index % len(COLORS)]
        parts.append(f'<path d="M{x} {y - 4}h22" stroke="{color}" stroke-width="2.5"/>')
        parts.append(_label(x + 28, y, escape(result.mode)))
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    results: Sequence[Curve], left: int, name: str, value: Callable[[Point], float]
) -> str:
    """Returns one plot, of the loss over something that a point has."""
    points = [p for r in results for p in r.points if math.isfinite(p.loss)]
    most = max(value(point) for point in points)
    low, high = min(p.loss for p in points), max(p.loss for p in points)
    span = (high - low) or 1.0

    def place(point: Point) -> str:
        x = left + PANEL * value(point) / most
        y = TOP + HEIGHT * (high - point.loss) / span
        return f"{x:.1f} {y:.1f}"

    parts = []
    for number in range(5):
        y = TOP + HEIGHT * number / 4
        loss = high - span * number / 4
        parts.append(f'<path d="M{left} {y}h{PANEL}" stroke="{RULE}"/>')
        parts.append(_label(left - 6, y + 4, f"{loss:.2f}", anchor="end"))
        x = left + PANEL * number / 4
        amount = f"{most * number / 4:,.0f}"
        parts.append(_label(x, TOP + HEIGHT + 18, amount, anchor="middle"))
    parts.append(_label(left + PANEL / 2, TOP + HEIGHT + 36, name, anchor="middle"))
    for index, result in enumerate(results):
        line = "L".join(place(p) for p in result.points if math.isfinite(p.loss))
        color = COLORS[index % len(COLORS)]
        parts.append(
            f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="1.8" '
            f'stroke-linejoin="round"><title>{escape(result.mode)}</title></path>'
        )
    return "\n".join(parts)


def _label(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{SOFT}" '
        f'text-anchor="{anchor}">{text}</text>'
    )
