"""What a run shows at its end: how right the forecast was, a sample, the report.

Everything is saved by then, so nothing here fails the run: what goes wrong is a warning
on the terminal and in the ledger.
"""

import contextlib
from collections.abc import Iterator

import jax
from rich.console import Console

from . import sampling, storage
from .ledger import Ledger
from .plan import forecast as forecast_lib
from .plan.comparison import compare
from .report import write_report
from .run_folder import RunFolder
from .setup import Setup
from .state import State


def finish(
    setup: Setup,
    folder: RunFolder,
    state: State,
    forecast: forecast_lib.Forecast | None,
    ledger: Ledger,
    console: Console,
) -> None:
    """Shows the end of a run; every process must call this.

    Args:
      forecast: None where there was none, or no step was done.
    """
    with _warns("compare the forecast with the run", ledger, console):
        _compare(forecast, setup, folder, console)
    with _warns("generate the sample", ledger, console):
        _sample(setup, folder, state, console)
    if jax.process_index() != 0:
        return
    saved = storage.checkpoints_of(folder.path, setup.config.checkpoint_folder)
    console.print(f"Checkpoints: {saved}")
    with _warns("write the report", ledger, console):
        console.print(f"Report: {write_report(folder.path)}")


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


def _compare(
    forecast: forecast_lib.Forecast | None,
    setup: Setup,
    folder: RunFolder,
    console: Console,
) -> None:
    """How right the forecast was; where there was none, that has been said."""
    if forecast is None or forecast.plan is None:
        return
    measured = forecast_lib.measure(setup, folder.path, forecast.start)
    document = forecast.to_json(measured)
    folder.write_json(forecast_lib.FILE, document)
    for line in compare(document):
        console.print(line, markup=False)


def _sample(setup: Setup, folder: RunFolder, state: State, console: Console) -> None:
    config = setup.config
    if config.sample_prompt is None:
        return
    text = sampling.sample(
        config,
        setup.mesh,
        setup.layout.canonical(state, setup.mesh).params,
        config.sample_prompt,
        config.sample_tokens,
    )
    folder.write_text("sample.txt", text)
    console.rule("sample")
    console.print(text, markup=False)
    console.rule()
