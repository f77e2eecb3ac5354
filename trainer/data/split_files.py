"""Which of the files in a folder belong to which split."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from . import documents
from .documents import Document, Split
from .splits import check_held_out, check_split, without


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """What sources of many files have in common.

    Attributes:
      path: a folder, a file or a glob.
      split_names: {split: name} if the data has splits already: of the files and
        folders in `path` that are called so, or begin with the name and one of "-_.".
      holdout: fraction held out for evaluation, selected by a hash. None means 0.05, or
        0 with an eval_path or split_names.
      eval_path: files to evaluate on, in the form of `path`; never trained on.
      test_holdout: like holdout, for a third split, "test".
      test_path: like eval_path, for the test split.
    """

    path: str
    split_names: Mapping[str, str] | None = None
    holdout: float | None = None
    eval_path: str | None = None
    test_holdout: float = 0.0
    test_path: str | None = None

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

    def has_own(self, split: Split) -> bool:
        """Returns whether the split has files or arrays of its own."""
        own = getattr(self, f"{split}_path", None)
        return own is not None or bool(self.split_names)

    def what(self, setting: str) -> str:
        return f"{type(self).__name__}({setting}='{getattr(self, setting)}')"

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


def some(names: Sequence[str]) -> str:
    """Returns the first few names, and how many there are besides."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
