"""Writes the metrics of a run to files and services.

A row is a flat dict with at least `step`. JSON has no NaN and no infinity, so they are
written as the strings "NaN", "Infinity" and "-Infinity" (null could not distinguish
them), and `read` returns them as floats.
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

# Optional writers, and the packages they need.
EXTRAS = {"tensorboard": "tensorboardX", "wandb": "wandb"}

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Writer(Protocol):
    """Writes groups of rows of one kind, in the order of their steps."""

    def write(self, kind: Kind, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """An append-only file with one JSON object per line.

    A row is complete once its newline is written. Anything after the last newline was
    left by a process that was killed while writing.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._is_checked = False

    def write(self, rows: Sequence[Row]) -> None:
        """Appends a group of rows with one flush; the file is open only during this."""
        text = "".join(_encode(row) + "\n" for row in rows)
        if not self._is_checked and _has_torn_end(self.path):
            raise ValueError(
                f"{self.path}: its last line is incomplete, because a process was "
                "killed while writing it; call truncate_after(step) before appending"
            )
        self._is_checked = True
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)

    def truncate_after(self, step: int) -> int:
        """Drops rows of steps after `step` and a torn last line.

        The new file replaces the old one atomically, so a kill loses nothing.

        Returns:
          The number of complete rows dropped.
        """
        if not self.path.exists():
            return 0
        kept, num_dropped = [], 0
        for where, line, row in _lines(self.path):
            if not isinstance(row.get("step"), int):
                raise ValueError(f"{where}: no integer `step` in {line!r}")
            if row["step"] > step:
                num_dropped += 1
            else:
                kept.append(line)
        if num_dropped or _has_torn_end(self.path):
            replace_text(self.path, "".join(line + "\n" for line in kept))
        return num_dropped


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the complete rows of a file, ignoring a torn last line."""
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
        """Truncates the files after `step`, where a resumed run starts."""
        for file in self._files.values():
            file.truncate_after(step)

    def write(self, kind: Kind, rows: Sequence[Row]) -> None:
        now = round(self._clock(), 3)
        self._files[kind].write([{**row, "time": now} for row in rows])

    def close(self) -> None:
        """Does nothing: no file is open between groups."""


class TensorBoardWriter:
    """Writes event files for TensorBoard; skips values that are not numbers.

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
            for name, value in _numbers(row).items():
                self._writer.add_scalar(f"{kind}/{name}", value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Sends rows to Weights & Biases, or to the folder with WANDB_MODE=offline.

    Args:
      run_id: pass the same id to continue a W&B run after a resume.
    """

    def __init__(self, workdir: Path, project: str, run_id: str | None = None):
        wandb = _import_extra("wandb")
        self._run = wandb.init(
            dir=str(workdir), project=project, id=run_id, resume="allow"
        )
        # Evaluation rows may arrive after training rows of later steps, and wandb drops
        # rows whose step decreases. So each kind has its own step metric.
        for kind in FILES:
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")

    def write(self, kind: Kind, rows: Sequence[Row]) -> None:
        for row in rows:
            values = {"step": row["step"], **_numbers(row)}
            self._run.log({f"{kind}/{name}": v for name, v in values.items()})

    def close(self) -> None:
        self._run.finish()


def check_installed(extras: Iterable[str]) -> None:
    """Raises if a writer's package is missing, before a run folder is created."""
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


def _numbers(row: Row) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, numbers.Real)
    }


def _encode(row: Row) -> str:
    if not isinstance(row.get("step"), numbers.Integral):
        raise ValueError(f"a row of metrics needs an integer `step`, got {dict(row)!r}")
    plain = {name: _plain(value) for name, value in row.items()}
    return json.dumps(plain, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Converts a Python or NumPy scalar to a JSON value."""
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
                    "fix or remove the line"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{where}: found {line[:60]!r}, expected one JSON object; "
                    "fix or remove the line"
                )
            yield where, line, row
