"""Sources: where examples come from, as nodes of the config.

A source is plain data; files are touched by `open` alone. Nothing here knows of jax.
"""

import dataclasses
import hashlib
import math
from typing import Any, Literal, Protocol

import numpy as np

from . import documents, order, shards
from .packing import PackedDataset
from .tokenizer import Bytes, Tokenizer

Split = Literal["train", "eval", "test"]


class Dataset(Protocol):
    """An opened split: examples with random access, safe to read from threads.

    Training reads example i of epoch e by `example(i, e)` where a dataset has that,
    for augmentation that differs by epoch. It must be a pure function, as `[i]` is.

    Throughput is counted in examples, unless the dataset names what its examples are
    made of: `unit`, a plural noun such as "tokens", and `units_per_example`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, np.ndarray]:
        """Returns example i: named arrays, of the same shapes for every i."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns counts and path, for the log.

        A `digest` among them stands for the contents of the split. Without one, and
        without a method `files() -> {name: path}`, examples are read to make one.
        """
        ...

    def loss_units(self, loss: float) -> dict[str, float]:
        """Returns a mean loss in the data's own units, {} if there is none."""
        ...


class Source(Protocol):
    """A node of the config that opens datasets."""

    def open(self, split: Split) -> Dataset: ...


def throughput_unit(dataset: Dataset) -> tuple[str, int]:
    """Returns what throughput is counted in, and how many of them an example has."""
    unit = getattr(dataset, "unit", "examples")
    count = getattr(dataset, "units_per_example", 1)
    name = type(dataset).__name__
    if not (isinstance(unit, str) and unit.isidentifier()):
        raise ValueError(
            f"dataset {name}: unit is {unit!r}; expected one word, for instance "
            "'images', which names the figure images_per_s."
        )
    if count < 1:
        raise ValueError(
            f"dataset {name}: units_per_example is {count}; expected >= 1 {unit}."
        )
    return unit, count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Text files as bytes: tokens 0 to 255, and 256 for the end of a document.

    Attributes:
        path: a folder, a file, a glob, or "stdlib" for the source of Python's own
            standard library (a folder of that name is "./stdlib").
        length: tokens of an example.
        pattern: which files of the folder; None takes all that are not hidden.
        holdout: share of the documents, chosen by a hash of the name, for evaluation.
        separate_documents: add `segments` and `positions`, so that the model keeps
            documents packed into one example apart.
    """

    path: str
    length: int
    pattern: str | None = None
    holdout: float = 0.05
    separate_documents: bool = False

    def __post_init__(self):
        _check_text(self)

    def open(self, split: Split) -> PackedDataset:
        _check_split(self, split)
        what = f"Text(path='{self.path}')"
        found = documents.find(self.path, self.pattern, what=what)
        keys = [documents.split_key(document.name) for document in found]
        chosen = [found[i] for i in _of_split(keys, split, self.holdout, what)]
        return PackedDataset(
            np.array([document.num_bytes for document in chosen], np.int64),
            _FileReader([document.path for document in chosen]),
            end=Bytes.end,
            length=self.length,
            num_bytes=sum(document.num_bytes for document in chosen),
            separate_documents=self.separate_documents,
            what=f"{what}, split '{split}'",
            about={
                "source": "Text",
                "path": self.path,
                "split": split,
                "vocab_size": Bytes.vocab_size,
            },
            files={document.name: document.path for document in chosen},
        )

    def tokenizer(self) -> Tokenizer:
        return Bytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecords:
    """A corpus that `meshloom data build` wrote into the folder `path`.

    The other attributes are those of `Text`; equal names give equal splits.
    """

    path: str
    length: int
    holdout: float = 0.05
    separate_documents: bool = False

    def __post_init__(self):
        _check_text(self)

    def open(self, split: Split) -> PackedDataset:
        _check_split(self, split)
        what = f"ArrayRecords(path='{self.path}')"
        built = shards.Corpus(self.path, what=what)
        keys = built.index["key"].tolist()
        chosen = np.array(_of_split(keys, split, self.holdout, what), np.int64)
        return PackedDataset(
            built.index["tokens"][chosen],
            lambda i, start, stop: built.read(int(chosen[i]), start, stop),
            end=built.manifest["end"],
            length=self.length,
            num_bytes=int(built.index["bytes"][chosen].sum()),
            separate_documents=self.separate_documents,
            what=f"{what}, split '{split}'",
            about={
                "source": "ArrayRecords",
                "path": self.path,
                "split": split,
                "vocab_size": built.manifest["vocab_size"],
                "digest": built.manifest["digest"],
            },
        )

    def tokenizer(self) -> Tokenizer:
        return shards.load_tokenizer(
            self.path, what=f"ArrayRecords(path='{self.path}')"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Walks on a random graph where each token has `branches` equally likely followers.

    No model can do better than a loss of ln(branches), and a good one comes close.
    Both splits walk on the same graph and share no example.
    """

    vocab_size: int
    length: int
    num_examples: int = 65536
    num_eval_examples: int = 1024
    branches: int = 4
    seed: int = 0

    def __post_init__(self):
        for name in ("vocab_size", "length", "num_examples", "num_eval_examples"):
            _check_positive(self, name)
        if not 1 <= self.branches <= self.vocab_size:
            raise ValueError(
                f"Synthetic: branches is {self.branches}; expected 1 to vocab_size "
                f"({self.vocab_size})."
            )

    def open(self, split: Split) -> "SyntheticDataset":
        _check_split(self, split)
        return SyntheticDataset(self, split)


class SyntheticDataset:
    """The opened `Synthetic` source."""

    unit = "tokens"

    def __init__(self, source: Synthetic, split: Split):
        self._source = source
        self._split = split
        self.units_per_example = source.length
        tokens = np.arange(source.vocab_size)
        self._followers = order.permute(
            tokens, source.vocab_size, order.keys(source.seed, tokens * 0)
        ).tolist()

    def __len__(self) -> int:
        train = self._split == "train"
        return self._source.num_examples if train else self._source.num_eval_examples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of a dataset of {len(self)} examples")
        source = self._source
        # Even numbers are keys of the train split, odd ones of the eval split.
        key = order.keys(source.seed, 1 + 2 * i + (self._split == "eval"))
        draws = order.mix(key + np.arange(source.length + 1).astype(np.uint64))
        token = int(draws[0] % np.uint64(source.vocab_size))
        tokens = [token]
        for branch in (draws[1:] % np.uint64(source.branches)).tolist():
            token = self._followers[(token + branch) % source.vocab_size]
            tokens.append(token)
        array = np.array(tokens, np.int32)
        return {
            "inputs": array[:-1],
            "targets": array[1:],
            "weights": np.ones(source.length, np.float32),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "source": "Synthetic",
            "split": self._split,
            "examples": len(self),
            "length": self._source.length,
            "tokens": len(self) * self._source.length,
            "vocab_size": self._source.vocab_size,
            "lowest_loss": math.log(self._source.branches),
            "digest": hashlib.sha256(f"1 {self._source}".encode()).hexdigest(),
        }

    def loss_units(self, loss: float) -> dict[str, float]:
        del loss
        return {}


class _FileReader:
    """Reads pieces of files; a file that changed since the listing is an error."""

    def __init__(self, paths: list[str]):
        self._paths = paths

    def __call__(self, i: int, start: int, stop: int) -> np.ndarray:
        with open(self._paths[i], "rb", buffering=0) as file:
            file.seek(start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise ValueError(
                f"'{self._paths[i]}' was shortened while it was in use: bytes {start} "
                f"to {stop} gave {len(data)}. Start again with files that stay as "
                "they are."
            )
        return np.frombuffer(data, np.uint8)


def _of_split(keys: list[int], split: Split, holdout: float, what: str) -> list[int]:
    """Returns the numbers of the documents that belong to the split."""
    wanted = split == "eval"
    chosen = [
        i for i, k in enumerate(keys) if documents.is_held_out(k, holdout) == wanted
    ]
    if not chosen:
        change = "Raise" if wanted else "Lower"
        raise ValueError(
            f"{what}: split '{split}' is empty: holdout={holdout} of {len(keys)} "
            f"documents leaves none for it. {change} holdout, or add documents."
        )
    return chosen


def _check_text(source: Text | ArrayRecords) -> None:
    name = type(source).__name__
    if not source.path:
        raise ValueError(f"{name}: path is empty; name a folder.")
    _check_positive(source, "length")
    if not 0 <= source.holdout < 1:
        raise ValueError(
            f"{name}: holdout is {source.holdout}; expected a share of the documents, "
            "at least 0 and below 1."
        )


def _check_positive(source: Any, name: str) -> None:
    value = getattr(source, name)
    if value < 1:
        raise ValueError(
            f"{type(source).__name__}: {name} is {value}; expected at least 1."
        )


def _check_split(source: Any, split: str) -> None:
    if split not in ("train", "eval"):
        raise ValueError(
            f"{type(source).__name__}: no split '{split}'; expected 'train' or 'eval'."
        )
