"""The speed-up of each mesh over its devices, as an SVG."""

import math
from collections.abc import Sequence
from html import escape

from .compare_plot import COLORS, FONT, INK, PAPER, RULE, SOFT
from .scale_result import Measured, Result

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 250, 72, 60


def svg(result: Result) -> str:
    """Draws a point and its range for each mesh, the ideal, and what was foretold."""
    devices = sorted({mesh.devices for mesh in result.meshes})
    ideal = devices[-1] / result.base.devices
    shown = [result.speedup(mesh)[2] for mesh in result.meshes]
    shown += [result.foretold_speedup(mesh) or 0.0 for mesh in result.meshes]
    highest = max(ideal, *shown)
    most = math.ceil(highest)

    def x(number: float) -> float:
        low, high = math.log(devices[0]), math.log(devices[-1])
        part = (math.log(number) - low) / (high - low) if high > low else 0.5
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(speed: float) -> float:
        return HEIGHT - BOTTOM - speed / most * (HEIGHT - TOP - BOTTOM)

    title = f"Speed-up over {result.base.text}, {result.kind} scaling"
    parts = [_text(LEFT, 30, title, INK, size=17)]
    for tick in range(0, most + 1, math.ceil(most / 6)):
        line = f"M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"
        parts.append(f'<path d="{line}" stroke="{RULE}"/>')
        parts.append(_text(LEFT - 8, y(tick) + 4, str(tick), SOFT, anchor="end"))
    for number in devices:
        place = HEIGHT - BOTTOM + 20
        parts.append(_text(x(number), place, str(number), SOFT, anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    words = "devices; dashed: no loss; bars: range of the rounds; rings: foretold"
    parts.append(_text(middle, HEIGHT - 14, words, SOFT, anchor="middle"))
    # Curved on this axis, so drawn through several points.
    numbers = [devices[0] * (devices[-1] / devices[0]) ** (i / 24) for i in range(25)]
    line = "L".join(f"{x(n):.1f} {y(n / result.base.devices):.1f}" for n in numbers)
    parts.append(f'<path d="M{line}" stroke="{SOFT}" stroke-dasharray="5 4"/>')
    for index, mesh in enumerate(result.meshes):
        parts.append(_mesh(result, mesh, index, x(mesh.devices), y))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}" role="img" '
        f'fill="none" aria-label="{escape(title)}">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _mesh(result: Result, mesh: Measured, index: int, x: float, y) -> str:
    color = COLORS[index % len(COLORS)]
    same: Sequence[str] = [m.text for m in result.meshes if m.devices == mesh.devices]
    x += 9 * same.index(mesh.text)  # beside others with as many devices
    speed, low, high = result.speedup(mesh)
    place = TOP + 20 * index
    parts = [
        f'<path d="M{x:.1f} {y(low):.1f}V{y(high):.1f}" stroke="{color}" '
        'stroke-width="2"/>',
        f'<circle cx="{x:.1f}" cy="{y(speed):.1f}" r="4" fill="{color}">'
        f"<title>{escape(mesh.text)}: {speed:.2f}</title></circle>",
        f'<circle cx="{WIDTH - RIGHT + 20}" cy="{place - 4}" r="4" fill="{color}"/>',
        _text(WIDTH - RIGHT + 32, place, f"{mesh.text}  {speed:.2f}", INK),
    ]
    if (foretold := result.foretold_speedup(mesh)) is not None:
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y(foretold):.1f}" r="5" stroke="{color}">'
            f"<title>{escape(mesh.text)}, foretold: {foretold:.2f}</title></circle>"
        )
    return "".join(parts)


def _text(
    x: float, y: float, words: str, color: str, *, anchor: str = "start", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )
