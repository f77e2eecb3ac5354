"""What the tables of forecasts share: bars, seconds and colours."""

WIDTH = 32


def print_styled(text: str) -> None:
    """Prints through rich, which knows the terminal's colours; wraps no lines."""
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    styled.highlight_regex("█+", "cyan")
    styled.highlight_regex("It fits|It does not fit|Nothing fits", "bold")
    Console().print(styled, soft_wrap=True)


def bar(share: float, width: int = WIDTH) -> str:
    filled = min(width, round(share * width))
    more = "+" if share > 1 else ""
    return "█" * filled + more if filled else "▏" * (share > 0)


def seconds_text(seconds: float) -> str:
    """0.0125 -> '12.5 ms'."""
    # What three digits would round up to 1000 belongs to the next unit.
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, least in (("s", 1), ("ms", 1e-3)):
        if seconds >= 0.9995 * least:
            return f"{seconds / least:.3g} {unit}"
    return f"{1e6 * seconds:.3g} µs"
