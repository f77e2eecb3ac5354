"""The timeline of a run as SVG: who was up, what died, and when commits were made."""

from html import escape

from ..record.curves import linear_ticks
from .tables import section, table
from .timeline_data import Lane, Timeline

LEFT, WIDTH, HEIGHT, GAP, TOP = 100, 900, 16, 8, 4
MOST_EVENTS = 50  # rows of the table
UNITS = ((7200 * 24, 86400, "d"), (7200, 3600, "h"), (180, 60, "min"), (0, 1, "s"))


def timeline(found: Timeline | None) -> str:
    """Returns the section: a picture, and a table of what happened."""
    if found is None:
        return ""
    start, end = _bounds(found)
    lanes = [_ticks(found, start, end)]
    for number, lane in enumerate(found.lanes, start=1):
        lanes.append(_lane(lane, TOP + number * (HEIGHT + GAP), start, end))
    bottom = TOP + (len(found.lanes) + 1) * (HEIGHT + GAP)
    deaths = sum(m.kind != "resize" for lane in found.lanes for m in lane.marks)
    resizes = sum(m.kind == "resize" for lane in found.lanes for m in lane.marks)
    about = (
        f"{len(found.lanes)} lanes, {len(found.commits)} {found.what}, {deaths} deaths "
        f"or stalls, {resizes} resizes"
    )
    picture = (
        f'<div class="schedule timeline"><svg viewBox="0 0 {LEFT + WIDTH} '
        f'{bottom + 22}" role="img" aria-label="{about}">{"".join(lanes)}'
        f"{_axis(end - start, bottom)}</svg></div>"
    )
    back = ", those that a restart took back dashed" if found.taken_back else ""
    note = (
        '<p class="note">Bars: up (copies: each block has all of them). Crosses: '
        "deaths and stalls; triangles: resizes, and servers that came or went. "
        f"{found.what.capitalize()} are lines{back}. The first bar begins at "
        "0.</p>"
    )
    return section("Timeline", picture + note + _events(found, start, end))


def _bounds(found: Timeline) -> tuple[float, float]:
    spans = [span for lane in found.lanes for span in lane.spans]
    start = min(span[0] for span in spans)
    marks = [mark.time for lane in found.lanes for mark in lane.marks]
    ends = [span[1] for span in spans]
    return start, max(*ends, *marks, *found.commits, start + 1.0)


def _x(time: float, start: float, end: float) -> float:
    share = (time - start) / (end - start)
    return LEFT + WIDTH * min(max(share, 0.0), 1.0)


def _ticks(found: Timeline, start: float, end: float) -> str:
    """Returns a line for each commit; those on the same pixel are one."""
    parts = [_label(TOP, found.what)]
    for kind, times in (("commit", found.commits), ("back", found.taken_back)):
        places = sorted({round(_x(time, start, end)) for time in times})
        lines = "".join(f"M{x} {TOP}v{HEIGHT}" for x in places)
        parts.append(f'<path class="{kind}" d="{lines}"/>')
    return "".join(parts)


def _lane(lane: Lane, y: int, start: float, end: float) -> str:
    parts = [_label(y, lane.name)]
    parts.append(
        f'<rect class="down" x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}"/>'
    )
    for first, last in lane.spans:
        x, stop = _x(first, start, end), _x(last, start, end)
        text = f"{lane.name}: up from {_clock(first - start)} to {_clock(last - start)}"
        parts.append(
            f'<rect class="up" x="{x:.1f}" y="{y}" width="{max(stop - x, 1):.1f}" '
            f'height="{HEIGHT}"><title>{escape(text)}</title></rect>'
        )
    for mark in lane.marks:
        x, middle = _x(mark.time, start, end), y + HEIGHT / 2
        shape = f"M{x - 4:.1f} {middle - 4}l8 8m-8 0l8 -8"
        if mark.kind == "resize":
            shape = f"M{x - 5:.1f} {y}h10l-5 8z"
        text = f"{lane.name}, {_clock(mark.time - start)}: {mark.text}"
        parts.append(
            f'<path class="{mark.kind}" d="{shape}"><title>{escape(text)}</title>'
            "</path>"
        )
    return "".join(parts)


def _axis(seconds: float, bottom: int) -> str:
    _, unit, name = next(row for row in UNITS if seconds >= row[0])
    parts = [_label(bottom, name)]
    for tick in linear_ticks(0, seconds / unit):
        x = LEFT + WIDTH * tick * unit / seconds
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 12}" text-anchor="middle">{tick:g}</text>'
        )
    return "".join(parts)


def _label(y: float, text: str) -> str:
    return f'<text x="0" y="{y + 12}">{escape(text)}</text>'


def _events(found: Timeline, start: float, end: float) -> str:
    """Returns a table of deaths and resizes, oldest first."""
    marks = [(mark, lane.name) for lane in found.lanes for mark in lane.marks]
    marks.sort(key=lambda pair: pair[0].time)
    if not marks:
        return ""
    rows = [
        [_clock(mark.time - start), escape(name), mark.kind, escape(mark.text)]
        for mark, name in marks[:MOST_EVENTS]
    ]
    more = ""
    if len(marks) > MOST_EVENTS:
        more = f"<p>And {len(marks) - MOST_EVENTS} more, in supervisor.jsonl.</p>"
    return table(("Time", "Who", "What", "Why"), rows) + more


def _clock(seconds: float) -> str:
    """Returns a time since the start, such as 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
