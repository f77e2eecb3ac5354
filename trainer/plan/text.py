"""What the tables of plans have in common: bars and colours."""

from ...sharding.text import seconds_text as seconds_text

WIDTH = 32


def print_styled(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    # Through rich, which knows whether the terminal has colours; long lines stay whole.
    styled = Text(text)
    styled.highlight_regex("█+", "cyan")
    styled.highlight_regex("It fits|It does not fit|Nothing fits", "bold")
    Console().print(styled, soft_wrap=True)


def bar(share: float, width: int = WIDTH) -> str:
    filled = min(width, round(share * width))
    more = "+" if share > 1 else ""
    return "█" * filled + more if filled else "▏" * (share > 0)
