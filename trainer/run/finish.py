"""The end of a run: a sample, a classifier's mistakes, and what its observer adds.

Everything is saved by then, so nothing here fails the run: an error becomes a warning
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
from . import mistakes, sampling
from .prepare import Prepared
from .run import Run


class Observer(Protocol):
    """Watches a run without taking part in it."""

    def on_start(
        self, prepared: Prepared, folder: RunFolder, start: int, hosts: Sequence[str]
    ) -> str:
        """Called before the first step; returns a line to print."""
        ...

    def on_end(
        self, prepared: Prepared, folder: RunFolder
    ) -> Iterable[tuple[str, Callable[[], Iterable[str]]]]:
        """Returns tasks for the end: a description, and a function that returns lines.

        The description completes the sentence "could not ...".
        """
        ...


def finish(run: Run, state: State, observer: Observer | None) -> None:
    """Prints a sample, and runs the observer's tasks. Every process must call this."""
    prepared, folder, console = run.prepared, run.folder, run.console
    with _warn_on_error("generate the sample", run.ledger, console):
        _sample(prepared, folder, state, console)
    with _warn_on_error("compare predictions with labels", run.ledger, console):
        _mistakes(prepared, folder, state)
    saved = storage.checkpoints_of(folder.path, prepared.config.checkpoint_folder)
    console.print(f"Checkpoints: {saved}")
    for description, task in observer.on_end(prepared, folder) if observer else ():
        with _warn_on_error(description, run.ledger, console):
            for line in task():
                console.print(line, markup=False)


@contextlib.contextmanager
def _warn_on_error(what: str, ledger: Ledger, console: Console) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        console.print(
            f"warning: could not {what} ({reason}). The run is complete and saved.",
            markup=False,
        )
        with contextlib.suppress(OSError):  # printed above, and the disk may be full
            ledger.event("warning", text=f"could not {what}: {reason}")


def _sample(
    prepared: Prepared, folder: RunFolder, state: State, console: Console
) -> None:
    config = prepared.config
    if config.sample_prompt is None:
        return
    state = prepared.layout.canonical(state, prepared.mesh)
    text = sampling.sample(
        config,
        prepared.mesh,
        state.params,
        config.sample_prompt,
        config.sample_tokens,
        variables=state.variables,
    )
    folder.write_text("sample.txt", text)
    console.rule("sample")
    console.print(text, markup=False)
    console.rule()


def _mistakes(prepared: Prepared, folder: RunFolder, state: State) -> None:
    found = mistakes.compare(prepared, state)
    if found is not None:
        folder.write_json(mistakes.FILE, found)
