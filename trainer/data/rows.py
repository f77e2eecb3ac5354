"""Examples that are rows of tables: which columns become which arrays of a batch.

A *table* is a file, or a few that belong together, with random access to its rows. A
dataset is the rows of several tables, one table after the other.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

# What numbers of 64 bits become, as jax computes with 32.
_NARROW = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}


class Table(Protocol):
    """Rows with named columns, safe to read from threads.

    Attributes:
      path: of its file or folder, for messages.
      columns: their names.
    """

    path: str
    columns: Sequence[str]

    def __len__(self) -> int: ...

    def row(self, i: int, columns: Sequence[str]) -> Mapping[str, Any]:
        """Returns these columns of row i: numbers, arrays, lists or strings."""
        ...


class ArrayTable:
    """A table in memory, or mapped into it: columns are arrays of equal length."""

    def __init__(self, path: str, arrays: Mapping[str, np.ndarray], what: str):
        self.path, self._arrays = path, dict(arrays)
        self.columns: Sequence[str] = list(self._arrays)
        shapes = {name: array.shape for name, array in self._arrays.items()}
        if flat := [name for name, shape in shapes.items() if not shape]:
            raise ValueError(
                f"{what}: '{path}': array '{flat[0]}' is a single number, not rows. "
                "Name the arrays to read in columns."
            )
        lengths = {name: shape[0] for name, shape in shapes.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"{what}: '{path}': arrays have different numbers of rows, {lengths}. "
                "Make them equal, or name the arrays to read in columns."
            )
        self._length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def row(self, i: int, columns: Sequence[str]) -> dict[str, Any]:
        return {name: self._arrays[name][i] for name in columns}


@dataclasses.dataclass(frozen=True)
class Columns:
    """How a row becomes an example; `tables.TableFiles` describes the fields."""

    columns: Mapping[str, str | tuple[str, ...]] | None
    classes: Mapping[str, tuple[str, ...]]
    scale: Mapping[str, float]
    shapes: Mapping[str, tuple[int, ...]]
    what: str

    def sources(self, table: Table) -> dict[str, tuple[str, ...]]:
        """Returns the columns of the table that each array is made of."""
        chosen = self.columns
        if chosen is None:
            chosen = {name: name for name in table.columns}
        parts = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in chosen.items()}
        for column in (column for names in parts.values() for column in names):
            if column not in table.columns:
                raise ValueError(
                    f"{self.what}: '{table.path}' has no column '{column}', only "
                    f"{', '.join(table.columns)}. Correct columns, or the file."
                )
        for setting in ("classes", "scale", "shapes"):
            if unknown := set(getattr(self, setting)) - set(parts):
                raise ValueError(
                    f"{self.what}: {setting} names '{sorted(unknown)[0]}', but the "
                    f"arrays are {', '.join(parts)}. Correct {setting}."
                )
        return parts

    def example(
        self, table: Table, i: int, parts: Mapping[str, tuple[str, ...]]
    ) -> dict[str, np.ndarray]:
        names = list(dict.fromkeys(name for group in parts.values() for name in group))
        row = table.row(i, names)
        return {
            name: self._array(name, [row[each] for each in group], table, i)
            for name, group in parts.items()
        }

    def _array(self, name: str, values: list[Any], table: Table, i: int) -> np.ndarray:
        where = f"{self.what}: row {i} of '{table.path}': '{name}'"
        values = [self._number(name, value, where) for value in values]
        try:
            array = np.asarray(values[0] if len(values) == 1 else values)
        except ValueError:  # lists of different lengths
            array = np.asarray(None)
        if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
            raise ValueError(
                f"{where} is {_short(values[0])}, not numbers of one shape. Leave it "
                "out by naming the others in columns."
            )
        if name in self.scale:
            array = array.astype(np.float32) * np.float32(self.scale[name])
        if narrow := _NARROW.get(array.dtype.name):
            if array.dtype.kind != "f" and not _fits(array, narrow):
                raise ValueError(
                    f"{where} has the value {array.flat[np.argmax(np.abs(array))]}, "
                    f"which does not fit into {np.dtype(narrow)}. Store smaller "
                    "numbers, or give it a scale, which makes it float32."
                )
            array = array.astype(narrow)
        return self._shaped(name, array, where)

    def _shaped(self, name: str, array: np.ndarray, where: str) -> np.ndarray:
        shape = self.shapes.get(name)
        if shape is None:
            return array
        if array.size != int(np.prod(shape)):
            raise ValueError(
                f"{where} has {array.size} numbers, which do not have the shape "
                f"{tuple(shape)}. Correct shapes."
            )
        return array.reshape(shape)

    def _number(self, name: str, value: Any, where: str) -> Any:
        """Returns a value, or the number of its class if it is a string."""
        known = self.classes.get(name)
        if known is None:
            if isinstance(value, str | bytes):
                raise ValueError(
                    f"{where} is the text {_short(value)}. Name its classes, "
                    f"classes = {{'{name}': (...)}}, or leave it out of columns."
                )
            return value
        text = value.decode() if isinstance(value, bytes) else str(value)
        if text not in known:
            raise ValueError(
                f"{where} is {_short(text)}, which is not one of its classes "
                f"{', '.join(known)}. Add it to classes, or correct the row."
            )
        return np.int32(known.index(text))


class RowDataset:
    """A dataset of rows; see the module docstring.

    Args:
      selected: the rows of each table that belong to the split; None for all of them.
      about: entries that `describe` includes.
      files: {name: path} of the files that are read.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        columns: Columns,
        selected: Sequence[np.ndarray | None],
        *,
        about: Mapping[str, Any],
        files: Mapping[str, str],
        unit: str,
    ):
        self._tables, self._columns, self._selected = tables, columns, selected
        self._about, self._files, self.unit = dict(about), files, unit
        counts = [
            len(table) if rows is None else len(rows)
            for table, rows in zip(tables, selected, strict=True)
        ]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._parts = [columns.sources(table) for table in tables]
        self._form: dict[str, tuple[np.dtype, tuple[int, ...]]] | None = None
        for end, count in zip(self._ends.tolist(), counts, strict=True):
            if count:  # the first row of each table has the form of all others
                self[end - count]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of a dataset of {len(self)} examples")
        number = int(np.searchsorted(self._ends, i, side="right"))
        row = i - (int(self._ends[number - 1]) if number else 0)
        selected = self._selected[number]
        if selected is not None:
            row = int(selected[row])
        table = self._tables[number]
        example = self._columns.example(table, row, self._parts[number])
        if self._form is None:
            self._form = {k: (x.dtype, x.shape) for k, x in example.items()}
        return self._conform(example, table, row)

    def _conform(
        self, example: dict[str, np.ndarray], table: Table, row: int
    ) -> dict[str, np.ndarray]:
        """Returns the example in the form of the first one, or raises."""
        assert self._form is not None
        where = f"{self._columns.what}: row {row} of '{table.path}'"
        if example.keys() != self._form.keys():
            raise ValueError(
                f"{where} has the arrays {', '.join(example)}, but the first file has "
                f"{', '.join(self._form)}. Name the ones to read in columns."
            )
        for name, array in example.items():
            dtype, shape = self._form[name]
            if array.dtype != dtype and array.dtype.kind in "iu" and dtype.kind == "f":
                example[name] = array = array.astype(dtype)
            if (array.dtype, array.shape) != (dtype, shape):
                raise ValueError(
                    f"{where}: '{name}' is {array.dtype}{list(array.shape)}, but "
                    f"{dtype}{list(shape)} in the first row. Make all rows alike."
                )
        return example

    def files(self) -> Mapping[str, str]:
        return self._files

    def describe(self) -> dict[str, Any]:
        form = (self._form or {}).items()
        arrays = [f"{k} {d}{list(shape) if shape else ''}" for k, (d, shape) in form]
        classes = list(self._columns.classes.values())
        return {
            **self._about,
            **({"num_classes": len(classes[0])} if len(classes) == 1 else {}),
            "arrays": ", ".join(arrays),
            "examples": len(self),
        }

    def loss_units(self, loss: float) -> dict[str, float]:
        del loss
        return {}


def _fits(array: np.ndarray, dtype: Any) -> bool:
    limits = np.iinfo(dtype)
    inside = array.min() >= limits.min and array.max() <= limits.max
    return array.size == 0 or bool(inside)


def _short(value: Any) -> str:
    text = repr(str(value) if isinstance(value, str) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."
