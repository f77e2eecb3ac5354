"""The files that `meshloom predict` reads: text, arrays, or what a source can open."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import documents, open_source
from ..data.batches import WEIGHTS
from ..data.refusals import refusals_of
from ..data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .train import Config

Example = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Examples to predict on, and where each comes from.

    Attributes:
      about: returns what identifies example i in the output, such as its file.
    """

    size: int
    example: Callable[[int], Example]
    about: Callable[[int], dict[str, Any]] = lambda i: {}

    def __len__(self) -> int:
        return self.size


def of_split(config: "Config", split: Any) -> Inputs:
    """Returns the examples of a split of the run's data."""
    data = open_source(config.data, split)
    return Inputs(len(data), data.__getitem__)


def of_path(config: "Config", path: Path) -> Inputs:
    """Returns the examples of a file or folder, as the run's data has them.

    A source may have a method `inputs(path)` that returns a dataset. Otherwise a source
    with a tokenizer reads text, and any other npz files with the model's arrays.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist. Name a file or a folder.")
    source: Any = config.data
    if hasattr(source, "inputs"):
        with refusals_of(source, "inputs"):
            data = source.inputs(str(path))
        about = getattr(data, "about", lambda i: {})
        return Inputs(len(data), data.__getitem__, about)
    if hasattr(source, "tokenizer") and hasattr(source, "length"):
        return _text(path, source.tokenizer(), source.length)
    return _arrays(path)


def _text(path: Path, tokenizer: Tokenizer, length: int) -> Inputs:
    """Returns windows of `length` tokens, each of one document.

    As in training, the end token comes before a document and after it, so that every
    token is predicted once.
    """
    names: list[str] = []
    streams: list[np.ndarray] = []
    windows: list[tuple[int, int]] = []
    for number, document in enumerate(documents.find(str(path), what=str(path))):
        tokens = tokenizer.encode(Path(document.path).read_bytes())
        end = np.array([tokenizer.end], np.int32)
        names.append(document.name)
        streams.append(np.concatenate([end, tokens.astype(np.int32), end]))
        windows += [(number, at) for at in range(0, len(streams[-1]) - 1, length)]

    def example(i: int) -> Example:
        number, start = windows[i]
        found = streams[number][start : start + length + 1]
        tokens = np.full(length + 1, tokenizer.end, np.int32)
        tokens[: len(found)] = found
        weights = (np.arange(length) < len(found) - 1).astype(np.float32)
        return {"inputs": tokens[:-1], "targets": tokens[1:], WEIGHTS: weights}

    def about(i: int) -> dict[str, Any]:
        number, start = windows[i]
        stop = min(start + length, len(streams[number]) - 1)
        return {"file": names[number], "start": start, "tokens": stop - start}

    return Inputs(len(windows), example, about)


def _arrays(path: Path) -> Inputs:
    """Returns the rows of npz files, in the order of their names."""
    paths = sorted(path.rglob("*.npz")) if path.is_dir() else [path]
    if not paths or paths[0].suffix != ".npz":
        raise ValueError(
            f"{path} has no npz file. Name one, or a folder with some, whose arrays "
            "are those of the model, one row per example."
        )
    files = [_read_npz(file) for file in paths]
    for file, arrays in zip(paths, files, strict=True):
        shapes = [
            {name: (x.dtype, x.shape[1:]) for name, x in found.items()}
            for found in (files[0], arrays)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{file} has other arrays than {paths[0]}: {_listed(arrays)}, not "
                f"{_listed(files[0])}. Make all examples have the same arrays."
            )
    ends = np.cumsum([len(next(iter(arrays.values()))) for arrays in files])
    if not ends[-1]:
        raise ValueError(f"{path} has no rows to predict on")

    def place(i: int) -> tuple[int, int]:
        number = int(np.searchsorted(ends, i, side="right"))
        return number, i - (int(ends[number - 1]) if number else 0)

    def example(i: int) -> Example:
        number, row = place(i)
        return {name: array[row] for name, array in files[number].items()}

    def about(i: int) -> dict[str, Any]:
        number, row = place(i)
        name = paths[number].name
        if path.is_dir():
            name = paths[number].relative_to(path).as_posix()
        return {"file": name, "index": row}

    return Inputs(int(ends[-1]), example, about)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as file:  # never unpickles
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # zipfile and numpy raise many types
        raise ValueError(f"{path} cannot be read as npz: {error}") from error
    lengths = {len(array) if array.ndim else None for array in arrays.values()}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            f"{path}: the arrays {_listed(arrays)} do not have the same number of "
            "rows. Give each a row for every example."
        )
    return arrays


def _listed(arrays: dict[str, np.ndarray]) -> str:
    shapes: Sequence[str] = [
        f"{name} {x.dtype}{list(x.shape)}" for name, x in arrays.items()
    ]
    return ", ".join(shapes) or "nothing"
