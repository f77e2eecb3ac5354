"""Draws a simulated run as SVG: learners down, time across."""

import math
from html import escape

from .cluster import Outcome, Segment

COLORS = {
    "compute": "#14605c",
    "send": "#e08a3c",
    "wait": "#f0ede5",
    "down": "#1f2328",
}
LABELS = {
    "compute": "computing",
    "send": "sending or receiving",
    "wait": "waiting",
    "down": "down",
}
PAPER, RULE, INK, SOFT, COMMIT = "#fbfaf7", "#dedad0", "#1f2328", "#69707a", "#a8430f"
FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif"
# Pixels.
MARGIN, LEFT, WIDTH, HEAD, AXIS = 24, 78, 900, 112, 26
MOST_LEARNERS = 32
MOST_COMMITS = 300  # lines closer than 3 pixels are not worth drawing


def svg(title: str, outcome: Outcome, until: float | None = None) -> str:
    """Returns a self-contained picture of a run that was simulated with `record`.

    Args:
      until: draws the time up to here only; by default the whole run.
    """
    end = min(until or outcome.seconds, outcome.seconds)
    num_shown = min(len(outcome.learners), MOST_LEARNERS)
    height = 22 if num_shown <= 16 else 12
    bottom = HEAD + num_shown * (height + 4)
    size = MARGIN * 2 + LEFT + WIDTH, bottom + AXIS + MARGIN
    scale = WIDTH / end
    parts = [_frame(title, _caption(outcome, num_shown, end), size), _legend()]
    for index in range(num_shown):
        y = HEAD + index * (height + 4)
        parts.append(_label(MARGIN, y + height * 0.7, f"learner {index}"))
        mine = [s for s in outcome.segments if s.learner == index and s.start < end]
        parts += [_box(s, y, height, scale, end) for s in mine]
    parts.append(_commit_lines(outcome, end, scale, bottom))
    parts.append(_axis(end, scale, bottom))
    return "\n".join([*parts, "</svg>", ""])


def _caption(outcome: Outcome, num_shown: int, end: float) -> str:
    text = (
        f"goodput {100 * outcome.goodput:.1f} %, {outcome.num_commits} commits in "
        f"{outcome.seconds:,.0f} s, waiting {100 * outcome.waiting:.1f} %, mean "
        f"staleness {outcome.mean_staleness:.2f}"
    )
    if num_shown < len(outcome.learners):
        text += f"; learners 0 to {num_shown - 1} of {len(outcome.learners)}"
    if end < outcome.seconds:
        text += f"; the first {end:,.0f} s"
    return text


def _frame(title: str, caption: str, size: tuple[int, int]) -> str:
    width, height = size
    title, caption = escape(title), escape(caption)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img" '
        f'aria-label="{title}; {caption}">\n'
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" '
        f'fill="{PAPER}" stroke="{RULE}"/>\n'
        f'<text x="{MARGIN}" y="36" font-size="17" font-weight="600" fill="{INK}">'
        f"{title}</text>\n{_label(MARGIN, 57, caption)}"
    )


def _legend() -> str:
    parts, x = [], MARGIN
    for kind, label in LABELS.items():
        parts.append(
            f'<rect x="{x}" y="72" width="16" height="14" rx="2" '
            f'fill="{COLORS[kind]}" stroke="{RULE}"/>'
        )
        parts.append(_label(x + 22, 83, label))
        x += 44 + 7 * len(label)
    parts.append(f'<path d="M{x} 72V86" stroke="{COMMIT}" stroke-width="1.5"/>')
    return "".join([*parts, _label(x + 8, 83, "commit")])


def _box(part: Segment, y: float, height: int, scale: float, end: float) -> str:
    x = MARGIN + LEFT + part.start * scale
    width = (min(part.end, end) - part.start) * scale
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" '
        f'fill="{COLORS[part.kind]}"><title>learner {part.learner}: '
        f"{LABELS[part.kind]}, {part.start:.2f} to {part.end:.2f} s</title></rect>"
    )


def _commit_lines(outcome: Outcome, end: float, scale: float, bottom: int) -> str:
    shown = [time for time in outcome.commits if time <= end]
    if len(shown) > MOST_COMMITS:
        text = f"{len(shown)} commits: too many to draw"
        return _label(MARGIN + LEFT + WIDTH - 190, 83, text)
    lines = "".join(
        f"M{MARGIN + LEFT + time * scale:.2f} {HEAD - 6}V{bottom}" for time in shown
    )
    return f'<path d="{lines}" stroke="{COMMIT}" stroke-width="1" opacity="0.75"/>'


def _axis(end: float, scale: float, bottom: int) -> str:
    rough = end / 8
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    parts = [_label(MARGIN, bottom + 18, "seconds")]
    for index in range(int(end / step + 1e-9) + 1):
        x = MARGIN + LEFT + index * step * scale
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" font-size="11" fill="{SOFT}" '
            f'text-anchor="middle">{index * step:g}</text>'
        )
    return "".join(parts)


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y:g}" font-size="12" fill="{SOFT}">{text}</text>'
