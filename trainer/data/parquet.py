"""Sources of rows: Parquet files, and datasets saved by Hugging Face `datasets`."""

import collections
import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import documents
from .documents import Document, Split
from .optional import library
from .rows import Table
from .splits import check_split
from .tables import TableFiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(TableFiles):
    """Parquet files (pip install 'meshloom[parquet]').

    Columns are numbers, names of classes, and lists of numbers, all of equal lengths.

    Attributes:
      cache_bytes: how much decoded data is kept. A row is read by decoding its row
        group, so shuffled data should fit, or have small row groups.
    """

    cache_bytes: int = 2**30

    SUFFIXES = (".parquet",)

    def _tables(self, files: Sequence[Document], split: Split) -> dict[str, Table]:
        del split
        cache = _Cache(self.cache_bytes)
        return {
            each.name: ParquetTable(each.path, cache, what=self.what("path"))
            for each in files
        }


class _Cache:
    """Keeps the row groups that were read last, up to a number of bytes."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, read: Any) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            table = self._kept[key] = read()
            self._bytes += table.nbytes
            while self._bytes > self._max_bytes and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
            return table


class ParquetTable:
    """The rows of a Parquet file."""

    def __init__(self, path: str, cache: _Cache, *, what: str):
        parquet = library("pyarrow.parquet", what=what, extra="parquet")
        self.path, self._cache, self._what = path, cache, what
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except (OSError, ValueError) as error:  # pyarrow's own are among these
            raise ValueError(
                f"{what}: '{path}' is not a Parquet file ({_line(error)}). Correct the "
                "path, or write it again."
            ) from error
        self.columns: Sequence[str] = list(self._file.schema_arrow.names)
        about = self._file.metadata
        groups = range(about.num_row_groups)
        counts = [about.row_group(group).num_rows for group in groups]
        self._ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, i: int, columns: Sequence[str]) -> Mapping[str, Any]:
        group = int(np.searchsorted(self._ends, i, side="right"))
        first = int(self._ends[group - 1]) if group else 0
        names = tuple(columns)
        table = self._cache.get(
            (self.path, group, names),
            lambda: self._file.read_row_group(group, columns=list(names)),
        )
        return {
            name: self._value(table.column(name)[i - first], name, i) for name in names
        }

    def _value(self, scalar: Any, name: str, row: int) -> Any:
        try:
            return _number(scalar)
        except _Null:
            raise ValueError(
                f"{self._what}: row {row} of '{self.path}': '{name}' has no value. "
                "Fill it in, or leave the row or the column out."
            ) from None


class _Null(Exception):
    """A value is missing."""


def _number(scalar: Any) -> Any:
    """Returns a scalar of Arrow as NumPy has it, with the same type of numbers."""
    if not scalar.is_valid:
        raise _Null
    kind = scalar.type
    if not hasattr(kind, "value_type"):  # not a list
        value = scalar.as_py()
        if isinstance(value, bool | int | float):
            return np.asarray(value, kind.to_pandas_dtype())
        return value
    values = scalar.values
    if values is not None and hasattr(kind.value_type, "value_type"):
        return np.stack([_number(each) for each in values])
    if values is None or values.null_count:
        raise _Null
    return values.to_numpy(zero_copy_only=False)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# What Hugging Face calls the splits of a dataset.
_NAMES = {"train": "train", "eval": "validation", "test": "test"}
_DICT, _STATE = "dataset_dict.json", "state.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFace(TableFiles):
    """A folder that `save_to_disk` of Hugging Face `datasets` wrote.

    It needs `pip install 'meshloom[huggingface]'`. A `DatasetDict` has splits already,
    "train", "validation" and "test" unless split_names says otherwise; a `Dataset` is
    split by share or by other folders (`eval_path`). Images are decoded to arrays.
    """

    def documents(self, split: Split) -> list[Document]:
        check_split(self, split)
        folder = Path(getattr(self, f"{split}_path", None) or self.path)
        what = self.what("path")
        if self.has_own(split) and (folder / _DICT).exists():
            folder = folder / self.split_name(split)
        if not (folder / _STATE).exists():
            raise ValueError(
                f"{what}: '{folder}' is not a dataset that save_to_disk wrote: it has "
                f"no {_STATE}. Correct the path or split_names."
            )
        return documents.find(str(folder), "*.arrow", what=what)

    def check_growing(self) -> None:
        """Raises ValueError: it is saved as a whole."""
        raise ValueError(
            f"follow: {self.what('path')}: a saved dataset does not grow. Add Parquet "
            "files to a folder and read them with Parquet."
        )

    def has_own(self, split: Split) -> bool:
        return super().has_own(split) or (Path(self.path) / _DICT).exists()

    def split_name(self, split: Split) -> str:
        return super().split_name(split) if self.split_names else _NAMES[split]

    def _tables(self, files: Sequence[Document], split: Split) -> dict[str, Table]:
        folder = os.path.dirname(files[0].path)
        return {"": HuggingFaceTable(folder, what=self.what("path"))}


class HuggingFaceTable:
    """The rows of a saved dataset."""

    def __init__(self, folder: str, *, what: str):
        datasets = library("datasets", what=what, extra="huggingface")
        self.path = folder
        try:
            loaded = datasets.load_from_disk(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"{what}: '{folder}' cannot be read ({_line(error)}). Save it again."
            ) from error
        self.columns: Sequence[str] = list(loaded.column_names)
        self._rows = loaded.with_format("numpy")
        self._chosen: dict[tuple[str, ...], Any] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int, columns: Sequence[str]) -> Mapping[str, Any]:
        names = tuple(columns)
        if names not in self._chosen:  # other columns are not decoded
            self._chosen[names] = self._rows.select_columns(list(names))
        return self._chosen[names][i]
