"""The safetensors files of a model's folder. Nothing is unpickled or downloaded."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..data.optional import library
from .tensors import BUFFERS, HEAD

CONFIG, SINGLE = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# What belongs to a tokenizer; tokenizer.json is enough.
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    "chat_template.jinja",
)


def safetensors(what: str) -> Any:
    return library("safetensors", what=what, extra="safetensors")


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); expected the folder of a model "
            f"with {CONFIG} and {SINGLE} (or {INDEX})"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, found {type(found).__name__}")
    return found


class Tensors:
    """The tensors of a folder, read one at a time. Close it after use.

    Attributes:
      names: of all tensors, in the order of the files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._open = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        self._library = safetensors(f"{folder}: the weights")
        try:
            for path in _files(folder):
                self._add(path)
            _check_index(folder, self._file_of)
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path) -> None:
        try:
            # Not mapped: pages of a mapped file count as memory of this process.
            opened = self._library.safe_open(path, framework="np", backend="pread")
            file = self._open.enter_context(opened)
        except (OSError, self._library.SafetensorError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118  # not a dict
            if name in self._file_of:
                raise ValueError(f"{path}: tensor {name!r} is in another file too")
            self._file_of[name] = file

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def dtype(self, name: str) -> str:
        """Returns the dtype of a tensor, such as bfloat16; raises for a quantized."""
        found = self._file_of[name].get_slice(name).get_dtype()
        if found not in DTYPES:
            raise ValueError(
                f"{self.folder}: tensor {name!r} has dtype {found}; expected "
                f"{', '.join(DTYPES)}. Quantized weights are not imported: give the "
                "folder of the original weights."
            )
        return DTYPES[found]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        return self._file_of[name].get_tensor(name)

    def rows(self, name: str, count: int = 4096) -> Iterator[np.ndarray]:
        """Returns a tensor in parts of `count` rows."""
        found = self._file_of[name].get_slice(name)
        total = found.get_shape()[0]
        for i in range(0, total, count):
            yield found[i : min(i + count, total)]

    def close(self) -> None:
        self._open.close()


def _files(folder: Path) -> list[Path]:
    """Returns the files with the tensors; raises ValueError if there are none."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        found = f"; {pickled[0]} is pickled, which is not read" if pickled else ""
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}{found}. Save the model with "
            "safe_serialization=True."
        )
    names = sorted(set(_weight_map(folder).values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{folder / INDEX}: {name!r} is not the name of a file")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} names {name}, which is missing")
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map of tensors to files")
    return weight_map


def _check_index(folder: Path, found: Iterable[str]) -> None:
    if (folder / SINGLE).is_file():
        return
    if lost := sorted(set(_weight_map(folder)) - set(found)):
        raise ValueError(
            f"{folder / INDEX} names {lost[0]!r}, which is in none of the files"
        )


def check_names(tensors: Tensors, expected: set[str], embedding: str | None) -> None:
    """Raises ValueError for tensors that are missing or not known.

    Args:
      embedding: the tensor that a head must be equal to, if there is one.
    """
    found = {name for name in tensors.names if not name.endswith(BUFFERS)}
    if missing := sorted(expected - found):
        raise ValueError(
            f"{tensors.folder}: {_some(missing)} missing, which config.json demands"
        )
    extra = found - expected
    if embedding is not None and HEAD in extra:
        extra.remove(HEAD)
        parts = zip(tensors.rows(HEAD), tensors.rows(embedding), strict=True)
        if not all(np.array_equal(a, b) for a, b in parts):
            raise ValueError(
                f"{tensors.folder}: config.json has tie_word_embeddings, but {HEAD} "
                f"differs from {embedding}"
            )
    if extra:
        raise ValueError(
            f"{tensors.folder}: {_some(sorted(extra))} not known for this model"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {names[0]!r}{more}"
