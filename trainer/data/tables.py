"""What sources of rows have in common: which files and rows belong to a split."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from . import documents, shuffle
from .documents import Document, Split
from .rows import Columns, Rows, Table
from .splits import check_held_out, check_split, holdout_of, without


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFiles:
    """What sources of rows have in common.

    Numbers of 64 bits become 32 bits. An integer that does not fit is an error.

    Attributes:
      path: a folder, a file or a glob.
      columns: {array: column}, or {array: (column, column, ...)} for an array of
        several; None for all columns under their own names.
      classes: {array: (name, name, ...)} of a column of names, which become 0, 1, ...
      scale: {array: factor}; the array becomes float32.
      shapes: {array: shape} of an example, if it is not the one that is stored.
      split_names: {split: name} if the data has splits already: of the files and
        folders in `path` that are called so, or begin with the name and one of "-_.".
      holdout: fraction of the rows held out for evaluation, selected by a hash of the
        name of the file and the number of the row. None means 0.05, or 0 with an
        eval_path or split_names.
      eval_path: files to evaluate on, in the form of `path`; never trained on.
      test_holdout: like holdout, for a third split, "test".
      test_path: like eval_path, for the test split.
      unit: what throughput is counted in, a plural noun.
    """

    path: str
    columns: Mapping[str, str | tuple[str, ...]] | None = None
    classes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    scale: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    split_names: Mapping[str, str] | None = None
    holdout: float | None = None
    eval_path: str | None = None
    test_holdout: float = 0.0
    test_path: str | None = None
    unit: str = "examples"

    SUFFIXES: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        check_held_out(self)
        for split in self.split_names or ():
            check_split(self, split)
        others = ("holdout", "eval_path", "test_holdout", "test_path")
        if self.split_names and (given := [k for k in others if getattr(self, k)]):
            raise ValueError(
                f"{type(self).__name__}: {given[0]} has no effect with split_names, "
                "which already selects the data. Remove one of them."
            )

    def open(self, split: Split) -> Rows:
        return self.open_documents(split, self.documents(split))

    def documents(self, split: Split) -> list[Document]:
        """Returns the files that the rows of a split are in, sorted by name."""
        check_split(self, split)
        if own := getattr(self, f"{split}_path", None):
            return self._find(own, f"{split}_path")
        found = self._find(self.path, "path")
        if self.split_names is not None:
            return self._named(found, self.split_name(split))
        held_out = [
            document
            for name in ("eval_path", "test_path")
            if (path := getattr(self, name))
            for document in self._find(path, name)
        ]
        return without(found, held_out)

    def open_documents(self, split: Split, files: Sequence[Document]) -> Rows:
        """Opens a split with these of its files, in this order."""
        what, own = self.what("path"), getattr(self, f"{split}_path", None)
        tables = self._tables(files, split)
        if own or self.split_names:
            selected: list[np.ndarray | None] = [None] * len(tables)
        else:
            is_file = Path(self.path).is_file()  # its name does not matter
            selected = [
                self._select("" if is_file else name, len(table), split)
                for name, table in tables.items()
            ]
        settings = self.classes, self.scale, self.shapes
        rows = Rows(
            list(tables.values()),
            Columns(self.columns, *settings, what=what),
            selected,
            about={
                "source": type(self).__name__,
                "path": own or self.path,
                "split": split,
            },
            files={each.name: each.path for each in files},
            unit=self.unit,
        )
        if not len(rows):
            count = sum(map(len, tables.values()))
            raise ValueError(
                f"{what}: split '{split}' is empty: {len(files)} files have {count} "
                f"rows. Set {self._remedy(split)}, or add rows."
            )
        return rows

    def _tables(self, files: Sequence[Document], split: Split) -> dict[str, Table]:
        """Returns the tables of these files in order, under their names."""
        raise NotImplementedError

    def what(self, setting: str) -> str:
        return f"{type(self).__name__}({setting}='{getattr(self, setting)}')"

    def _remedy(self, split: Split) -> str:
        return {"train": "holdout lower", "eval": "eval_path, raise holdout"}.get(
            split, "test_path, raise test_holdout"
        )

    def split_name(self, split: Split) -> str:
        assert self.split_names is not None
        if split not in self.split_names:
            raise ValueError(
                f"{self.what('path')}: split_names names no split '{split}', only "
                f"{', '.join(self.split_names)}. Add it, or set {split}_batches=0."
            )
        return self.split_names[split]

    def _find(self, path: str, setting: str) -> list[Document]:
        what = self.what(setting)
        found = documents.find(path, what=what)
        if not Path(path).is_dir():
            other = [each for each in found if not each.name.endswith(self.SUFFIXES)]
            if other:
                raise ValueError(
                    f"{what}: '{other[0].path}' does not end in "
                    f"{' or '.join(self.SUFFIXES)}. Name other files, or choose the "
                    "source that reads them."
                )
        found = [each for each in found if each.name.endswith(self.SUFFIXES)]
        if not found:
            raise ValueError(
                f"{what}: no file in the folder ends in {' or '.join(self.SUFFIXES)}. "
                "Correct the path, or choose the source that reads its files."
            )
        return found

    def _named(self, found: list[Document], name: str) -> list[Document]:
        begins = re.compile(re.escape(name) + r"([-_./]|$)").match
        chosen = [each for each in found if begins(each.name)]
        if not chosen:
            raise ValueError(
                f"{self.what('path')}: split_names: nothing is called '{name}'. The "
                f"files are {some([each.name for each in found])}."
            )
        return chosen

    def _select(self, name: str, num_rows: int, split: Split) -> np.ndarray | None:
        """Returns the rows of a table that a hash assigns to the split."""
        holdout = holdout_of(self)
        if holdout.eval == holdout.test == 0:
            return None if split == "train" else np.array([], np.int64)
        keys = shuffle.keys(documents.split_key(name), np.arange(num_rows))
        ends = [int(x * 2**64) for x in (holdout.eval, holdout.eval + holdout.test)]
        number = np.searchsorted(np.array(ends, np.uint64), keys, side="right")
        return np.flatnonzero(number == ["eval", "test", "train"].index(split))


def some(names: Sequence[str]) -> str:
    """Returns the first few names, and how many there are besides."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
