"""What a run shows at its end: a sample, and what its observer adds.

Everything is saved by then, so nothing here fails the run: what goes wrong is a warning
on the terminal and in the ledger.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from rich.console import Console

from ..program.state import State
from ..record import storage
from ..record.ledger import Ledger
from ..record.run_folder import RunFolder
from . import sampling
from .prepare import Prepared


class Observer(Protocol):
    """Who watches a run from outside, and says what it makes of it."""

    def begins(
        self, prepared: Prepared, folder: RunFolder, start: int, hosts: Sequence[str]
    ) -> str:
        """Called before the first step; returns a line to print."""
        ...

    def ended(
        self, prepared: Prepared, folder: RunFolder
    ) -> Iterable[tuple[str, Callable[[], Iterable[str]]]]:
        """Returns what is to be done at the end: in words, and a function of lines."""
        ...


def finish(
    prepared: Prepared,
    folder: RunFolder,
    state: State,
    observer: Observer | None,
    ledger: Ledger,
    console: Console,
) -> None:
    """Shows the end of a run; every process must call this."""
    with _warns("generate the sample", ledger, console):
        _sample(prepared, folder, state, console)
    saved = storage.checkpoints_of(folder.path, prepared.config.checkpoint_folder)
    console.print(f"Checkpoints: {saved}")
    for what, do in observer.ended(prepared, folder) if observer else ():
        with _warns(what, ledger, console):
            for line in do():
                console.print(line, markup=False)


@contextlib.contextmanager
def _warns(what: str, ledger: Ledger, console: Console) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        console.print(
            f"warning: could not {what} ({reason}). The run is complete and saved.",
            markup=False,
        )
        with contextlib.suppress(OSError):  # said above, and the disk may be full
            ledger.event("warning", text=f"could not {what}: {reason}")


def _sample(
    prepared: Prepared, folder: RunFolder, state: State, console: Console
) -> None:
    config = prepared.config
    if config.sample_prompt is None:
        return
    text = sampling.sample(
        config,
        prepared.mesh,
        prepared.layout.canonical(state, prepared.mesh).params,
        config.sample_prompt,
        config.sample_tokens,
    )
    folder.write_text("sample.txt", text)
    console.rule("sample")
    console.print(text, markup=False)
    console.rule()
