"""Draws a schedule as text or SVG: one row per stage, one column per tick."""

import itertools
from collections.abc import Callable, Iterator
from html import escape
from typing import NamedTuple

from .schedule import IDLE, Schedule
from .simulate import simulate

# The shades of the first and the last chunk.
SHADES = {"forward": ("#14605c", "#8fcac4"), "backward": ("#a8430f", "#f3b98d")}
PAPER, RULE, EMPTY, INK, SOFT = "#fbfaf7", "#dedad0", "#f0ede5", "#1f2328", "#69707a"
FONT = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif"
TICKS_IN_ROW = 80
# Dimensions of the SVG in pixels.
MARGIN, LEFT, HALF, GAP = 24, 62, 17, 5
LEGEND, HEAD, AXIS, BETWEEN, MIN_WIDTH = 90, 116, 22, 18, 420

Position = Callable[[int, int], tuple[int, int]]  # (tick, stage) to the cell's corner


class Op(NamedTuple):
    kind: str
    tick: int
    stage: int
    microbatch: int
    chunk: int


def operations(schedule: Schedule) -> Iterator[Op]:
    """Yields every operation of a schedule, forwards first."""
    tables = {"forward": schedule.forward, "backward": schedule.backward}
    for kind, table in tables.items():
        for tick, row in enumerate(table.tolist()):
            for stage, (microbatch, chunk) in enumerate(row):
                if microbatch != IDLE:
                    yield Op(kind, tick, stage, microbatch, chunk)


def text(schedule: Schedule, width: int = 100, *, color: bool = False) -> str:
    """Returns text with a row of forwards (F) and of backwards (B) for every stage.

    If not all ticks fit into `width`, those in the middle are left out and named in a
    line of their own.

    Args:
      width: of the longest line, in characters.
      color: whether to color the cells with 24-bit ANSI codes.
    """
    S, M, R = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    cells = {(op.kind, op.stage, op.tick): op for op in operations(schedule)}
    size = len(str(M - 1)) + len(_letter(R - 1) if R > 1 else "") + 1
    margin = len(f"stage {S - 1}  F ")
    shown = _shown(schedule.num_ticks, size, width - margin)

    def cell(kind: str, stage: int, tick: int | None) -> str:
        if tick is None:
            return _ELLIPSIS
        op = cells.get((kind, stage, tick))
        if op is None:
            return f"{'.':>{size - 1}} "
        number = f"{op.microbatch}{_letter(op.chunk) if R > 1 else ''}"
        label = f"{number:>{size - 1}} "
        return _paint(label, _shade(kind, op.chunk, R)) if color else label

    lines = [_axis(shown, size, margin)]
    for stage in range(S):
        for kind in SHADES:
            name = f"stage {stage}" if kind == "forward" else ""
            row = "".join(cell(kind, stage, tick) for tick in shown)
            lines.append(f"{name:{margin - 3}} {kind[0].upper()} {row}".rstrip())
    if None in shown:
        first = shown.index(None)
        last = schedule.num_ticks - (len(shown) - first - 1) - 1
        lines.append(f"Ticks {first} to {last} of {schedule.num_ticks} are left out.")
    letters = "; letters are chunks of layers" if R > 1 else ""
    lines.append(f"F forward and B backward of microbatches{letters}; . idle")
    return "\n".join(lines)


_ELLIPSIS = "... "


def _shown(num_ticks: int, size: int, room: int) -> list[int | None]:
    """Returns the ticks that fit; None stands for those left out."""
    if num_ticks * size <= room:
        return list(range(num_ticks))
    count = max((room - len(_ELLIPSIS)) // size, 2)
    tail = count // 2
    return [*range(count - tail), None, *range(num_ticks - tail, num_ticks)]


def _axis(shown: list[int | None], size: int, margin: int) -> str:
    """Returns the axis: every fifth tick number, right-aligned above its cell."""
    line = f"{'tick':{margin}}"
    end = margin
    for tick in shown:
        end += len(_ELLIPSIS) if tick is None else size
        if tick is not None and tick % 5 == 0 and len(line) + len(str(tick)) < end:
            line = line.ljust(end - 1 - len(str(tick))) + str(tick)
    return line


def _letter(chunk: int) -> str:
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def _shade(kind: str, chunk: int, num_chunks: int) -> bytes:
    first, last = (bytes.fromhex(color[1:]) for color in SHADES[kind])
    part = chunk / max(num_chunks - 1, 1)
    return bytes(round(x + (y - x) * part) for x, y in zip(first, last, strict=True))


def _ink(shade: bytes) -> bytes:
    """Returns dark or light ink, whichever is more legible on a shade."""
    luminance = sum(w * c for w, c in zip((0.299, 0.587, 0.114), shade, strict=True))
    return bytes.fromhex("1f2328" if luminance > 140 else "ffffff")


def _paint(label: str, shade: bytes) -> str:
    front, back = (";".join(map(str, rgb)) for rgb in (_ink(shade), shade))
    return f"\x1b[38;2;{front};48;2;{back}m{label}\x1b[0m"


def svg(schedule: Schedule) -> str:
    """Returns a self-contained SVG picture, with a tooltip for each cell.

    A tick with both forwards and backwards is split on all stages, with the forward on
    top: a stage with only one of the two is idle for the other half. Long schedules
    wrap into further rows.
    """
    num_rows = -(-schedule.num_ticks // TICKS_IN_ROW)
    in_row = -(-schedule.num_ticks // num_rows)
    cell = 28 if in_row <= 40 else 18
    stage_height = 2 * HALF + GAP
    row_height = AXIS + schedule.num_stages * stage_height + BETWEEN

    def position(tick: int, stage: int) -> tuple[int, int]:
        row, column = divmod(tick, in_row)
        x = MARGIN + LEFT + column * cell
        return x, HEAD + row * row_height + AXIS + stage * stage_height

    parts = []
    for row in range(num_rows):
        ticks = range(row * in_row, min((row + 1) * in_row, schedule.num_ticks))
        parts.append(_frame(schedule, ticks, position, cell))
    parts.append(_cells(schedule, position, cell))
    legend, legend_width = _legend(schedule)
    width = 2 * MARGIN + max(LEFT + in_row * cell, legend_width, MIN_WIDTH)
    height = HEAD + num_rows * row_height - BETWEEN + MARGIN
    title, time, memory = _captions(schedule)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img" '
        f'aria-label="{title}; {time}; {memory}">\n'
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" '
        f'fill="{PAPER}" stroke="{RULE}"/>\n'
        f'<text x="{MARGIN}" y="36" font-size="17" font-weight="600" fill="{INK}">'
        f"{title}</text>\n"
        f"{_label(MARGIN, 57, time)}\n{_label(MARGIN, 74, memory)}\n"
        f"{legend}\n{''.join(parts)}</svg>\n"
    )


def _captions(schedule: Schedule) -> tuple[str, str, str]:
    sim = simulate(schedule)
    R = sim.num_chunks
    stages = _plural(sim.num_stages, "stage")
    microbatches = _plural(sim.num_microbatches, "microbatch", "es")
    chunks = f" of {R} chunks" if R > 1 else ""
    return (
        f"{escape(schedule.name)}: {stages}{chunks}, {microbatches}",
        # Ticks differ in cost, so the number of ticks is not the time.
        f"{_plural(sim.num_ticks, 'tick')} in the time of {sim.forward_ticks / R:g} "
        f"forwards and {sim.backward_ticks / R:g} backwards",
        f"bubble {100 * sim.bubble:.1f} %, at most "
        f"{_plural(sim.slots, 'saved input')} on a stage",
    )


def _plural(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


def _legend(schedule: Schedule) -> tuple[str, int]:
    """Returns the legend and its width."""
    parts, x = [], MARGIN
    for kind in SHADES:
        for chunk in range(schedule.num_chunks):
            shade = _shade(kind, chunk, schedule.num_chunks)
            parts.append(_box(x, LEGEND, 16, 14, f"#{shade.hex()}"))
            x += 18
        chunks = f", chunks 0 to {schedule.num_chunks - 1}"
        label = kind + (chunks if schedule.num_chunks > 1 else "")
        parts.append(_label(x + 4, LEGEND + 11, label))
        x += 26 + 7 * len(label)
    parts += [
        _box(x, LEGEND, 16, 14, EMPTY),
        _label(x + 22, LEGEND + 11, "idle (bubble)"),
    ]
    return "".join(parts), x + 110 - MARGIN


def _box(x: int, y: int, width: int, height: int, fill: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" '
        f'fill="{fill}"/>'
    )


def _label(x: int, y: int, label: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="12" fill="{SOFT}">{label}</text>'


def _frame(schedule: Schedule, ticks: range, position: Position, cell: int) -> str:
    """Returns the stage and tick labels, and the background of idle cells."""
    axis = position(ticks.start, 0)[1] - 6
    parts = [_label(MARGIN, axis, "tick")]
    for stage in range(schedule.num_stages):
        x, y = position(ticks.start, stage)
        parts.append(_label(MARGIN, y + HALF + 4, f"stage {stage}"))
        parts.append(_box(x, y, len(ticks) * cell - 1, 2 * HALF, EMPTY))
    parts.append(f'<g font-size="10" fill="{SOFT}" text-anchor="middle">')
    for tick in ticks:
        if tick % 5 == 0 or tick == ticks.start:
            x, _ = position(tick, 0)
            parts.append(f'<text x="{x + cell // 2}" y="{axis}">{tick}</text>')
    return f"{''.join(parts)}</g>\n"


def _cells(schedule: Schedule, position: Position, cell: int) -> str:
    ops = list(operations(schedule))
    split_ticks = set.intersection(
        *({op.tick for op in ops if op.kind == kind} for kind in SHADES)
    )
    size = 11 if cell > 20 else 9.5
    fits = len(str(schedule.num_microbatches - 1)) * size * 0.62 <= cell - 2
    parts = []
    for kind, chunk in itertools.product(SHADES, range(schedule.num_chunks)):
        shade = _shade(kind, chunk, schedule.num_chunks)
        numbers = []
        parts.append(f'<g fill="#{shade.hex()}">')
        for op in (op for op in ops if (op.kind, op.chunk) == (kind, chunk)):
            x, y = position(op.tick, op.stage)
            split = op.tick in split_ticks
            y += HALF if split and kind == "backward" else 0
            height = HALF - 1 if split else 2 * HALF
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell - 1}" height="{height}" rx="2">'
                f"<title>{_tooltip(op)}</title></rect>\n"
            )
            x, y = x + (cell - 1) / 2, y + height / 2 + size * 0.36
            numbers.append(f'<text x="{x}" y="{y:.1f}">{op.microbatch}</text>')
        parts.append("</g>\n")
        if fits:
            parts.append(
                f'<g font-size="{size}" fill="#{_ink(shade).hex()}" '
                f'text-anchor="middle" pointer-events="none">{"".join(numbers)}</g>\n'
            )
    return "".join(parts)


def _tooltip(op: Op) -> str:
    return (
        f"tick {op.tick}, stage {op.stage}: {op.kind} of microbatch {op.microbatch}, "
        f"chunk {op.chunk}"
    )
