"""Files and services that the figures of a run are written to.

A row is a flat dict with at least `step`. JSON has no NaN and no infinity, so
they are written as the strings "NaN", "Infinity" and "-Infinity" (null would not
tell them apart), and `read` gives them back as floats.
"""

import importlib
import json
import math
import numbers
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ...launch.atomic_file import replace_text

Row = Mapping[str, Any]
Kind = Literal["train", "eval", "test"]

FILES: dict[Kind, str] = {
    "train": "metrics.jsonl",
    "eval": "eval.jsonl",
    "test": "test.jsonl",
}

# Writers beside the files, and the packages that they need.
EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb"}

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Writer(Protocol):
    """Takes groups of rows of one kind; rows come in the order of their steps."""

    def write(self, kind: Kind, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """An append-only file of one JSON object a line.

    A row is complete once its newline is written. Whatever follows the last
    newline was left by a process that was killed while it wrote.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._is_checked = False

    def write(self, rows: Sequence[Row]) -> None:
        """Appends a group of rows with one flush; the file is open only meanwhile."""
        text = "".join(_encode(row) + "\n" for row in rows)
        if not self._is_checked and _has_torn_end(self.path):
            raise ValueError(
                f"{self.path}: its last line has no end, a process was killed "
                "while it wrote it; call truncate_after(step) before you append"
            )
        self._is_checked = True
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)

    def truncate_after(self, step: int) -> int:
        """Drops rows of steps after `step` and a torn last line.

        Returns the number of complete rows dropped. The new file replaces the old
        one in one move, so a kill in the middle loses nothing.
        """
        if not self.path.exists():
            return 0
        kept, num_dropped = [], 0
        for where, line, row in _lines(self.path):
            if not isinstance(row.get("step"), int):
                raise ValueError(f"{where}: found no whole number `step` in {line!r}")
            if row["step"] > step:
                num_dropped += 1
            else:
                kept.append(line)
        if num_dropped or _has_torn_end(self.path):
            replace_text(self.path, "".join(line + "\n" for line in kept))
        return num_dropped


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the complete rows of a file; only a torn last line is forgiven."""
    return [
        {name: _decode(value) for name, value in row.items()}
        for _, _, row in _lines(Path(path))
    ]


def median_step_seconds(rows: Iterable[Row], start: int) -> float | None:
    """Returns the median of the recorded step times after step `start`."""
    seconds = [r["step_s"] for r in rows if "step_s" in r and r["step"] > start]
    return float(np.median(seconds)) if seconds else None


class FileWriter:
    """Writes metrics.jsonl, eval.jsonl and test.jsonl of a run folder.

    Each row also gets `time`, the Unix time at which its group was written.
    """

    def __init__(self, workdir: Path, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._files = {
            kind: JsonLines(Path(workdir) / name) for kind, name in FILES.items()
        }

    def truncate_after(self, step: int) -> None:
        """Makes the files end at `step`, where a resumed run starts."""
        for file in self._files.values():
            file.truncate_after(step)

    def write(self, kind: Kind, rows: Sequence[Row]) -> None:
        now = round(self._clock(), 3)
        self._files[kind].write([{**row, "time": now} for row in rows])

    def close(self) -> None:
        """Nothing is open between groups."""


class TensorBoardWriter:
    """Writes event files for TensorBoard; values that are no numbers are left out.

    Args:
      start: the step a run resumes from; TensorBoard hides events after it.
    """

    def __init__(self, logdir: Path, start: int = 0):
        tensorboard = _import_extra("tensorboard")
        self._writer = tensorboard.SummaryWriter(
            str(logdir), purge_step=start + 1 if start else None
        )

    def write(self, kind: Kind, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in _figures(row).items():
                self._writer.add_scalar(f"{kind}/{name}", value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Sends rows to Weights & Biases; WANDB_MODE=offline keeps them in the folder.

    Args:
      run_id: give the same one again to continue a run after a resume.
    """

    def __init__(self, workdir: Path, project: str, run_id: str | None = None):
        wandb = _import_extra("wandb")
        self._run = wandb.init(
            dir=str(workdir), project=project, id=run_id, resume="allow"
        )
        # Evaluation rows may arrive after training rows of later steps, and wandb
        # drops rows whose own step goes back: each kind counts by its own step.
        for kind in FILES:
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")

    def write(self, kind: Kind, rows: Sequence[Row]) -> None:
        for row in rows:
            figures = {"step": row["step"], **_figures(row)}
            self._run.log({f"{kind}/{name}": v for name, v in figures.items()})

    def close(self) -> None:
        self._run.finish()


def check_installed(extras: Iterable[str]) -> None:
    """Raises for a writer whose package is not there, before a run folder is made."""
    for extra in extras:
        _import_extra(extra)


def _import_extra(extra: str) -> Any:
    package = EXTRAS[extra]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ValueError(
            f"the {extra} writer needs the package {package}, which is not "
            f"installed; install it with: pip install 'meshloom[{extra}]'"
        ) from error


def _figures(row: Row) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, numbers.Real)
    }


def _encode(row: Row) -> str:
    if not isinstance(row.get("step"), numbers.Integral):
        raise ValueError(
            f"a row of metrics needs a whole number `step`, got {dict(row)!r}"
        )
    plain = {name: _plain(value) for name, value in row.items()}
    return json.dumps(plain, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Returns a value that JSON can hold, for Python and NumPy scalars alike."""
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _decode(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _has_torn_end(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _lines(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (file:line, text, object) of each complete line."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return
            where = f"{path}:{number}"
            try:
                line = raw[:-1].decode("utf-8")
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{where}: found {raw[:60]!r}, expected one JSON object ({error}); "
                    "repair or remove the line"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{where}: found {line[:60]!r}, expected one JSON object; "
                    "repair or remove the line"
                )
            yield where, line, row
