"""Sources of rows: NumPy arrays, and CSV files."""

import csv
import dataclasses
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .documents import Document, Split
from .rows import ArrayTable, Table
from .split_files import some
from .tables import TableFiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayFiles(TableFiles):
    """NumPy files, read through the memory map: rows are the first dimension.

    An `.npz` file is a table, with its arrays as columns; arrays in a compressed one
    are kept in memory. So is a folder of `.npy` files, each a column; a single one is a
    table with a column of its name, or with its fields as columns. If `path` is one
    `.npz` file, split_names are parts of the names of its arrays: `train_x` or
    `x_train` is column `x` of the split called "train".
    """

    SUFFIXES = (".npy", ".npz")

    def _named(self, found: list[Document], name: str) -> list[Document]:
        if _is_npz(self.path):
            return found
        return super()._named(found, name)

    def _tables(self, files: Sequence[Document], split: Split) -> dict[str, Table]:
        what = self.what("path")
        groups: dict[str, list[Document]] = {}
        for each in files:
            is_column = each.name.endswith(".npy")
            name = os.path.dirname(each.name) if is_column else each.name
            groups.setdefault(name, []).append(each)
        tables: dict[str, Table] = {}
        for name, group in groups.items():
            path = group[0].path
            if name.endswith(".npz"):
                arrays = _npz_arrays(path, what)
                if self.split_names is not None and _is_npz(self.path):
                    arrays = _arrays_of(arrays, self.split_name(split), path, what)
            else:
                path, arrays = os.path.dirname(path), {}
                for each in group:
                    arrays |= _npy_arrays(each.path, what)
            if self.columns is not None:
                used = {c for v in self.columns.values() for c in _as_tuple(v)}
                arrays = {k: v for k, v in arrays.items() if k in used} or arrays
            tables[name] = ArrayTable(path, arrays, what)
        return tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Csv(TableFiles):
    """CSV files with a header; each is read into memory when it is opened.

    A column of integers becomes int32, of other numbers float32; any other has names of
    classes (`classes`).
    """

    SUFFIXES = (".csv",)

    def _tables(self, files: Sequence[Document], split: Split) -> dict[str, Table]:
        del split
        what, tables = self.what("path"), {}
        for each in files:
            arrays = _read_csv(each.path, what)
            tables[each.name] = ArrayTable(each.path, arrays, what)
        return tables


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _is_npz(path: str) -> bool:
    return path.endswith(".npz") and Path(path).is_file()


def _npy_arrays(path: str, what: str) -> dict[str, np.ndarray]:
    """Returns the mapped array of an .npy file under its name, or its fields."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(
            f"{what}: '{path}' cannot be mapped ({_line(error)}). Write "
            "it with np.save, without objects."
        ) from error
    if array.dtype.names:
        return {name: array[name] for name in array.dtype.names}
    return {Path(path).stem: array}


def _npz_arrays(path: str, what: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file: mapped if stored, else in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            return {
                member.filename.removesuffix(".npy"): _npz_array(path, archive, member)
                for member in members
            }
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(
            f"{what}: '{path}' cannot be read ({_line(error)}). Write it "
            "with np.savez, without objects."
        ) from error


def _npz_array(
    path: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> np.ndarray:
    read = np.lib.format
    with archive.open(member) as file:
        version = read.read_magic(file)
        header = {
            (1, 0): read.read_array_header_1_0,
            (2, 0): read.read_array_header_2_0,
        }
        if version in header and member.compress_type == zipfile.ZIP_STORED:
            shape, is_fortran, dtype = header[version](file)
            if dtype.hasobject:
                raise ValueError(f"array {member.filename} has objects")
            offset = _data_offset(path, member) + file.tell()
            order = "F" if is_fortran else "C"
            if not np.prod(shape):
                return np.zeros(shape, dtype)
            return np.memmap(path, dtype, "r", offset, shape, order)
    with archive.open(member) as file:
        return read.read_array(file, allow_pickle=False)


def _data_offset(path: str, member: zipfile.ZipInfo) -> int:
    """Returns where the contents of a member begin, behind its local header."""
    with open(path, "rb") as file:
        file.seek(member.header_offset + 26)  # the lengths of its name and extra field
        name, extra = np.frombuffer(file.read(4), "<u2").tolist()
    return member.header_offset + 30 + name + extra


def _arrays_of(
    arrays: Mapping[str, np.ndarray], name: str, path: str, what: str
) -> dict[str, np.ndarray]:
    """Returns the arrays of a split, by names without that of the split."""
    begins, ends = f"{name}_", f"_{name}"
    chosen = {
        k.removeprefix(begins) if k.startswith(begins) else k.removesuffix(ends): array
        for k, array in arrays.items()
        if k.startswith(begins) or k.endswith(ends)
    }
    if not chosen:
        raise ValueError(
            f"{what}: split_names: no array of '{path}' is called '{begins}...' or "
            f"'...{ends}'. It has {some(list(arrays))}."
        )
    return chosen


def _read_csv(path: str, what: str) -> dict[str, np.ndarray]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            header, *rows = csv.reader(file)
        except (ValueError, csv.Error) as error:
            reason = "it has no header" if "unpack" in str(error) else _line(error)
            raise ValueError(
                f"{what}: '{path}' cannot be read as CSV ({reason}). Write UTF-8, a "
                "header, and commas."
            ) from error
    rows = [row for row in rows if row]
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(
                f"{what}: row {number} of '{path}' has {len(row)} values, but the "
                f"header has {len(header)}. Correct the row."
            )
    if len(set(header)) != len(header):
        raise ValueError(
            f"{what}: '{path}' has two columns of the same name: {', '.join(header)}. "
            "Rename one."
        )
    columns = list(zip(*rows, strict=True)) or [()] * len(header)
    return {
        name: _parsed(list(column))
        for name, column in zip(header, columns, strict=True)
    }


def _parsed(column: list[str]) -> np.ndarray:
    texts = np.array(column, np.str_)
    for dtype in (np.int64, np.float64):
        try:
            return texts.astype(dtype)
        except ValueError:
            continue
    return texts


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
