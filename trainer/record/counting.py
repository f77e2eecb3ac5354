"""Progress of something that has a known end: a bar on a terminal, or lines."""

import contextlib
import time
from collections.abc import Callable, Iterator

PRINT_SECONDS = 10.0


@contextlib.contextmanager
def counting(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with what is done and what there is, on stderr."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, unit)
        return
    columns = (
        bars.TextColumn(unit),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(console, unit: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if done < total and time.monotonic() - last >= PRINT_SECONDS:
            last = time.monotonic()
            console.print(f"{done:,} of {total:,} {unit}", highlight=False)

    return show
