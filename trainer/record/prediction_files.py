"""Files of predictions: JSON lines or npz, complete or not there at all."""

import contextlib
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...launch.atomic_file import replacing

Predictions = Mapping[str, np.ndarray]
# Writes the predictions of some examples, which `about` identifies.
Write = Callable[[list[dict[str, Any]], Predictions], None]


def check(path: Path) -> None:
    """Raises ValueError for a path that could not be written."""
    if path.suffix not in (".jsonl", ".npz"):
        raise ValueError(
            f"--output {path}: expected a name that ends with .jsonl or .npz"
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"--output {path}: folder {path.parent} does not exist; create it first"
        )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Write]:
    """Yields a function that writes rows; the file appears when the block succeeds."""
    with replacing(path, draft_name=f".{path.name}.tmp") as draft:
        if path.suffix == ".npz":
            columns: dict[str, list[np.ndarray]] = {}

            def collect(about: list[dict[str, Any]], rows: Predictions) -> None:
                _check_names(about[0], rows)
                for name in about[0]:
                    found = np.array([each[name] for each in about])
                    columns.setdefault(name, []).append(found)
                for name, array in rows.items():
                    columns.setdefault(name, []).append(array)

            yield collect
            arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
            _write_npz(draft, arrays)
            return
        with open(draft, "w", encoding="utf-8") as file:

            def write(about: list[dict[str, Any]], rows: Predictions) -> None:
                _check_names(about[0], rows)
                for i, each in enumerate(about):
                    found = {name: _plain(x[i].tolist()) for name, x in rows.items()}
                    file.write(json.dumps({**each, **found}, allow_nan=False) + "\n")

            yield write


def _check_names(about: Mapping[str, Any], rows: Predictions) -> None:
    if taken := sorted(about.keys() & rows.keys()):
        raise ValueError(
            f"predict of the model returned an array {taken[0]!r}, a name that says "
            "where a row comes from. Rename it."
        )


def _write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes what np.savez would, which takes no array of the name `file`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _plain(value: Any) -> Any:
    """Returns a value as JSON, which has no NaN: those are null."""
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
