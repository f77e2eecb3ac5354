"""What sources of rows have in common: which files and rows belong to a split."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from . import documents, shuffle
from .documents import Document, Split
from .rows import Columns, RowDataset, Table
from .split_files import SplitFiles
from .splits import check_folder, holdout_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFiles(SplitFiles):
    """What sources of rows have in common.

    A hash of the file's name and the number of the row holds rows out. Numbers of 64
    bits become 32 bits; an integer that does not fit is an error.

    Attributes:
      columns: {array: column}, or {array: (column, column, ...)} for an array of
        several; None for all columns under their own names.
      classes: {array: (name, name, ...)} of a column of names, which become 0, 1, ...
      scale: {array: factor}; the array becomes float32.
      shapes: {array: shape} of an example, if it is not the one that is stored.
      unit: what throughput is counted in, a plural noun.
    """

    columns: Mapping[str, str | tuple[str, ...]] | None = None
    classes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    scale: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    unit: str = "examples"

    def open(self, split: Split) -> RowDataset:
        return self.open_documents(split, self.documents(split))

    def check_growing(self) -> None:
        """Raises ValueError if the settings exclude that files are added."""
        check_folder(self)

    def open_documents(self, split: Split, files: Sequence[Document]) -> RowDataset:
        """Opens a split with these of its files, in this order."""
        what, own = self.what("path"), getattr(self, f"{split}_path", None)
        tables = self._tables(files, split)
        if self.has_own(split):
            selected: list[np.ndarray | None] = [None] * len(tables)
        else:
            is_file = Path(self.path).is_file()  # its name does not matter
            selected = [
                self._select("" if is_file else name, len(table), split)
                for name, table in tables.items()
            ]
        settings = self.classes, self.scale, self.shapes
        rows = RowDataset(
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

    def _remedy(self, split: Split) -> str:
        return {"train": "holdout lower", "eval": "eval_path, raise holdout"}.get(
            split, "test_path, raise test_holdout"
        )

    def _select(self, name: str, num_rows: int, split: Split) -> np.ndarray | None:
        """Returns the rows of a table that a hash assigns to the split."""
        holdout = holdout_of(self)
        if holdout.eval == holdout.test == 0:
            return None if split == "train" else np.array([], np.int64)
        keys = shuffle.keys(documents.split_key(name), np.arange(num_rows))
        ends = [int(x * 2**64) for x in (holdout.eval, holdout.eval + holdout.test)]
        number = np.searchsorted(np.array(ends, np.uint64), keys, side="right")
        return np.flatnonzero(number == ["eval", "test", "train"].index(split))
