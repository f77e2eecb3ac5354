"""What the tables of forecasts share: bars and colours."""

from ...sharding.text import seconds_text as seconds_text

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
