"""Formats numbers, byte sizes, times and tables as plain text."""

import math
from collections.abc import Collection, Sequence

SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def human_bytes(count: float) -> str:
    """Formats a number of bytes: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def short_number(value: float, digits: int = 4, *, fixed: bool = False) -> str:
    """1500 -> '1.5 k', 0.25 -> '0.25', 0.0003 -> '3e-4'.

    Args:
      digits: significant digits.
      fixed: keep trailing zeros, for a figure that is redrawn in place: '1.500 k'.
    """
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    form = f"{'#' if fixed else ''}.{digits}g"
    # What these digits would round up to 1000 belongs to the next unit.
    almost = 1 - 0.5 * 10**-digits
    for scale, unit in SCALES:
        if abs(value) >= scale * almost:
            return f"{format(value / scale, form).rstrip('.')} {unit}"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return format(value, form).rstrip(".")


def seconds_text(seconds: float) -> str:
    """A measured time, with three digits: 0.0125 -> '12.5 ms'."""
    # What three digits would round up to 1000 belongs to the next unit.
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, least in (("s", 1), ("ms", 1e-3)):
        if seconds >= 0.9995 * least:
            return f"{seconds / least:.3g} {unit}"
    return f"{1e6 * seconds:.3g} µs"


def duration(seconds: float) -> str:
    """A time to wait or work, in whole units: 8 s, 2 min 05 s, 3 h 07 min, 2 d 04 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, rest = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {rest:02} min"
    days, rest = divmod(hours, 24)
    return f"{days} d {rest:02} h"


def percent(share: float, digits: int = 1) -> str:
    """0.125 -> '12.5 %'."""
    return f"{100 * share:.{digits}f} %"


def counted(number: int, noun: str) -> str:
    """(2, 'process') -> '2 processes'."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Returns rows as aligned columns; `right` lists the right-aligned ones."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
