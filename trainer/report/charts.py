"""Draws curves over training steps as inline SVG, with HTML axes around it.

The SVG contains only lines and stretches to fill its box, while labels are HTML
positioned in percent of that box, so text and strokes keep their size at any width.
"""

import dataclasses
import json
import math
from html import escape

import numpy as np

from ...sharding.text import short_number
from ..record.curves import Axis, downsample, linear_ticks, value_axis

WIDTH, HEIGHT = 1000, 400
# More dots would overlap and hide the line between them.
MAX_DOTS = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Values over steps; `style` is the CSS class of the line: raw, mean or dots."""

    label: str
    style: str
    steps: np.ndarray
    values: np.ndarray

    def downsampled(self) -> "Curve":
        steps, values = downsample(self.steps, self.values)
        return dataclasses.replace(self, steps=steps, values=values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves that share their axes.

    Attributes:
      name: unique on the page; letters, digits, `-` and `_` only.
      title: the heading of the chart.
      curves: the curves, drawn in this order.
      last_step: the end of the step axis, the same for all charts of a page.
      from_zero: whether the linear axis starts at zero.
      with_log: whether the reader can switch to a logarithmic axis.
      wide: whether the chart spans the full width of the page.
    """

    name: str
    title: str
    curves: tuple[Curve, ...]
    last_step: int
    from_zero: bool = False
    with_log: bool = False
    wide: bool = False


def render(chart: Chart) -> str:
    """Returns the HTML figure: title, legend with the latest values, and curves."""
    curves = tuple(curve.downsampled() for curve in chart.curves)
    chart = dataclasses.replace(chart, curves=curves)
    values = np.concatenate([curve.values for curve in curves])
    with_log = chart.with_log and bool(np.any(np.isfinite(values) & (values > 0)))
    panes = [_pane(chart, value_axis(values, from_zero=chart.from_zero), "linear")]
    switch = ""
    if with_log:
        panes.append(_pane(chart, value_axis(values, log=True), "log"))
        switch = (
            '<label class="switch"><input type="checkbox" class="log-switch"> '
            "log scale</label>"
        )
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}" '
        f'id="chart-{chart.name}">'
        f"<figcaption><h3>{escape(chart.title)}</h3>{switch}</figcaption>"
        f"{_legend(chart)}{''.join(panes)}"
        f'<script type="application/json">{_data(chart)}</script></figure>'
    )


def _legend(chart: Chart) -> str:
    items = []
    for curve in chart.curves:
        last = short_number(float(curve.values[-1]))
        items.append(
            f'<li><i class="swatch {curve.style}"></i>{escape(curve.label)} '
            f'<b class="value">{last}</b></li>'
        )
    step = f'<li class="at">step <b class="step">{chart.last_step}</b></li>'
    return f'<ul class="legend">{"".join(items)}{step}</ul>'


def _data(chart: Chart) -> str:
    """Returns the read-out's data as JSON that cannot close the script element."""
    curves = [
        {
            "steps": curve.steps.tolist(),
            # JSON has no NaN; the read-out shows null as "not finite".
            "values": [
                float(f"{v:.6g}") if math.isfinite(v) else None
                for v in curve.values.tolist()
            ],
        }
        for curve in chart.curves
    ]
    data = {"last": chart.last_step, "curves": curves}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _pane(chart: Chart, axis: Axis, scale: str) -> str:
    rows = "".join(
        f'<span style="top:{100 * axis.part(tick):.2f}%">{short_number(tick)}</span>'
        for tick in axis.ticks
    )
    columns = "".join(
        f'<span style="left:{100 * tick / max(chart.last_step, 1):.2f}%">'
        f"{short_number(tick)}</span>"
        for tick in linear_ticks(0, chart.last_step)
    )
    return (
        f'<div class="pane {scale}"><div class="y" aria-hidden="true">{rows}</div>'
        f'<div class="plot" tabindex="0" aria-label="{escape(chart.title)}: arrow '
        f'keys read values">{_svg(chart, axis, scale)}<div class="guide"></div></div>'
        f'<div class="x" aria-hidden="true">{columns}</div></div>'
    )


def _svg(chart: Chart, axis: Axis, scale: str) -> str:
    key = f"{chart.name}-{scale}"
    parts = []
    for tick in axis.ticks:
        y = f"{HEIGHT * axis.part(tick):.1f}"
        parts.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
    gaps: set[str] = set()
    for curve in chart.curves:
        line, dots, curve_gaps = _paths(curve, axis, chart.last_step)
        parts.append(f'<path class="curve {curve.style}" d="{line}"/>')
        if curve.style == "dots" and len(curve.steps) <= MAX_DOTS:
            parts.append(f'<path class="points" d="{dots}"/>')
        gaps.update(curve_gaps)
    for x in sorted(gaps, key=float):
        parts.append(f'<line class="gap" x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}"/>')
    about = (
        f"{', '.join(curve.label for curve in chart.curves)} over steps 0 to "
        f"{chart.last_step}; {scale} axis from {short_number(axis.low)} to "
        f"{short_number(axis.high)}."
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{key}-title {key}-desc">'
        f'<title id="{key}-title">{escape(chart.title)}</title>'
        f'<desc id="{key}-desc">{escape(about)}</desc>{"".join(parts)}</svg>'
    )


def _paths(curve: Curve, axis: Axis, last_step: int) -> tuple[str, str, list[str]]:
    """Returns the line, the dots, and the x of each value that is not finite."""
    line, dots, gaps, is_open = [], [], [], False
    for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
        x = f"{WIDTH * step / max(last_step, 1):.1f}"
        if not math.isfinite(value):
            gaps.append(x)
        y = HEIGHT * axis.part(value)
        if not math.isfinite(y):
            is_open = False
            continue
        # h0 draws a dot, so that a point between two gaps is visible.
        dots.append(f"M{x} {y:.1f}h0")
        line.append(f"L{x} {y:.1f}" if is_open else dots[-1])
        is_open = True
    return "".join(line), "".join(dots), gaps
