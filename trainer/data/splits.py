"""The settings of sources that say what is held out for the eval and test splits."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, get_args

from .documents import DEFAULT_HOLDOUT, Document, Holdout, Split


class HeldOutSettings(Protocol):
    """The fields of a source; `Text` describes them."""

    @property
    def path(self) -> str: ...
    @property
    def holdout(self) -> float | None: ...
    @property
    def eval_path(self) -> str | None: ...
    @property
    def test_holdout(self) -> float: ...
    @property
    def test_path(self) -> str | None: ...


def holdout_of(source: HeldOutSettings) -> Holdout:
    """Returns what to hold out of `path`; 0 for a split that has its own path."""
    default = 0.0 if source.eval_path else DEFAULT_HOLDOUT
    fraction = default if source.holdout is None else source.holdout
    return Holdout(fraction, source.test_holdout)


def without(corpus: list[Document], held_out: Iterable[Document]) -> list[Document]:
    """Returns the documents that are not among those held out, whatever their names."""
    paths = {os.path.realpath(each.path) for each in held_out}
    return [each for each in corpus if os.path.realpath(each.path) not in paths]


def check_held_out(source: HeldOutSettings) -> None:
    name = type(source).__name__
    if not source.path:
        raise ValueError(f"{name}: path is empty; name a folder.")
    fractions = {"holdout": source.holdout or 0.0, "test_holdout": source.test_holdout}
    paths = {"holdout": "eval_path", "test_holdout": "test_path"}
    for setting, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise ValueError(
                f"{name}: {setting} is {fraction}; expected a fraction of the "
                "documents, >= 0 and < 1."
            )
        if fraction and getattr(source, paths[setting]) is not None:
            raise ValueError(
                f"{name}: {setting}={fraction} has no effect with {paths[setting]}, "
                "which already selects the documents. Remove one of them."
            )
    if sum(fractions.values()) >= 1:
        raise ValueError(
            f"{name}: holdout={source.holdout} and test_holdout={source.test_holdout} "
            "leave nothing to train on; their sum must be < 1."
        )


def check_folder(source: Any) -> None:
    """Raises if nothing can be added to the path of a source."""
    if Path(source.path).is_file():
        raise ValueError(
            f"follow: {type(source).__name__}(path='{source.path}') is one file. Name "
            "its folder, or a glob, so that files can be added."
        )


def check_positive(source: Any, name: str) -> None:
    value = getattr(source, name)
    if value < 1:
        raise ValueError(
            f"{type(source).__name__}: {name} is {value}; it must be >= 1."
        )


def check_split(source: Any, split: str) -> None:
    if split not in get_args(Split):
        raise ValueError(
            f"{type(source).__name__}: no split '{split}'; expected 'train', 'eval' or "
            "'test'."
        )
