"""Sizes and columns as plain text."""

from collections.abc import Collection, Sequence


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """0.0125 -> '12.5 ms'."""
    # What three digits would round up to 1000 belongs to the next unit.
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, least in (("s", 1), ("ms", 1e-3)):
        if seconds >= 0.9995 * least:
            return f"{seconds / least:.3g} {unit}"
    return f"{1e6 * seconds:.3g} µs"


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows as text in columns, some of them (by number) pushed to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
