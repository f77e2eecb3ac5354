"""Sources: config nodes that say where examples come from.

A source is plain data; only `open` touches files. Nothing here imports jax.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from . import corpus_files, documents, shuffle
from .documents import Document, FileReader, Span, Split
from .packing import PackedDataset
from .refusals import refusals_of
from .splits import (
    check_folder,
    check_held_out,
    check_positive,
    check_split,
    holdout_of,
    without,
)
from .tokenizer import Bytes, Tokenizer


class Dataset(Protocol):
    """An opened split: random access to its examples, safe to read from threads.

    If a dataset has a method `example(i, epoch)`, training calls it instead of `[i]`,
    so that augmentation can differ by epoch. Both must be pure functions.

    Throughput is counted in examples, unless the dataset names a smaller unit: `unit`,
    a plural noun such as "tokens", and `units_per_example`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, np.ndarray]:
        """Returns example i as named arrays, whose shapes are the same for every i."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns counts and path, for the log.

        An entry `digest` identifies the contents of the split. Without it, and without
        a method `files() -> {name: path}`, the trainer reads examples to compute one.
        """
        ...

    def loss_units(self, loss: float) -> dict[str, float]:
        """Returns a mean loss in units of the data, such as bits per byte, or {}."""
        ...


class Source(Protocol):
    """A config node that opens datasets."""

    def open(self, split: Split) -> Dataset: ...


def open_source(source: Source, split: Split) -> Dataset:
    """Opens a split; an error of a source of the user's own names its class."""
    with refusals_of(source, "open"):
        return source.open(split)


def throughput_unit(dataset: Dataset) -> tuple[str, int]:
    """Returns the unit of throughput and the number of units per example."""
    unit = getattr(dataset, "unit", "examples")
    count = getattr(dataset, "units_per_example", 1)
    name = type(dataset).__name__
    if not (isinstance(unit, str) and unit.isidentifier()):
        raise ValueError(
            f"dataset {name}: unit is {unit!r}; expected one word, for instance "
            "'images', which gives the metric images_per_s."
        )
    if count < 1:
        raise ValueError(
            f"dataset {name}: units_per_example is {count}; it must be >= 1 {unit}."
        )
    return unit, count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Text files as bytes: tokens 0 to 255, and 256 for the end of a document.

    Attributes:
      path: a folder, a file, a glob, or "stdlib" for the source of Python's own
        standard library (write "./stdlib" for a folder of that name).
      length: tokens per example.
      pattern: a glob that selects files of the folder; None means all that are not
        hidden.
      holdout: fraction of the documents held out for evaluation, selected by a hash of
        the name; the end of a single document. None means 0.05, or 0 with an eval_path.
      eval_path: documents to evaluate on, in the form of `path`. They are never trained
        on, even if `path` contains them too.
      test_holdout: like holdout, for a third split, "test".
      test_path: like eval_path, for the test split.
      separate_documents: add `segments` and `positions`, so that attention does not
        cross the boundaries of documents packed into one example.
    """

    path: str
    length: int
    pattern: str | None = None
    holdout: float | None = None
    eval_path: str | None = None
    test_holdout: float = 0.0
    test_path: str | None = None
    separate_documents: bool = False

    def __post_init__(self):
        check_held_out(self)
        check_positive(self, "length")

    def open(self, split: Split) -> PackedDataset:
        corpus, spans = self._find(split)
        return self._packed(split, [corpus[x.document] for x in spans], spans)

    def documents(self, split: Split) -> list[Document]:
        """Returns the files of a split, sorted by name."""
        corpus, spans = self._find(split)
        return [corpus[span.document] for span in spans]

    def open_documents(self, split: Split, files: Sequence[Document]) -> PackedDataset:
        """Opens a split with these files in this order, all of each."""
        spans = [Span(i, 0, each.num_bytes) for i, each in enumerate(files)]
        return self._packed(split, files, spans)

    def check_growing(self) -> None:
        """Raises ValueError if the settings exclude that files are added."""
        check_folder(self)
        corpus, _ = self._find("train")
        if len(corpus) == 1 and (self.test_holdout or holdout_of(self).eval):
            raise ValueError(
                f"follow: Text(path='{self.path}') has one document, whose end is held "
                "out. Set holdout=0 or eval_path, or begin with two documents."
            )

    def _find(self, split: Split) -> tuple[list[Document], list[Span]]:
        """Returns the documents that a split is taken from, and what belongs to it."""
        check_split(self, split)
        own = {name: self._own_documents(name) for name in ("eval", "test")}
        what, corpus = self._what, own.get(split)
        if corpus:
            return corpus, [Span(i, 0, x.num_bytes) for i, x in enumerate(corpus)]
        corpus = documents.find(self.path, self.pattern, what=what)
        corpus = without(corpus, own["eval"] + own["test"])
        sizes = np.array([each.num_bytes for each in corpus], np.int64)
        keys = [documents.split_key(each.name) for each in corpus]
        return corpus, holdout_of(self).select(keys, sizes, split, what)

    @property
    def _what(self) -> str:
        return f"Text(path='{self.path}')"

    def _packed(
        self, split: Split, selected: Sequence[Document], spans: list[Span]
    ) -> PackedDataset:
        return PackedDataset(
            np.array([len(span) for span in spans], np.int64),
            FileReader(list(selected), [span.start for span in spans]),
            end=Bytes.end,
            length=self.length,
            num_bytes=sum(map(len, spans)),
            separate_documents=self.separate_documents,
            what=f"{self._what}, split '{split}'",
            about={
                "source": "Text",
                "path": getattr(self, f"{split}_path", None) or self.path,
                "split": split,
                "vocab_size": Bytes.vocab_size,
            },
            files={each.name: each.path for each in selected},
        )

    def _own_documents(self, split: Split) -> list[Document]:
        """Returns the documents of a split's own path, [] if it has none."""
        name = f"{split}_path"
        path = getattr(self, name)
        return documents.find(path, what=f"Text({name}='{path}')") if path else []

    def tokenizer(self) -> Tokenizer:
        return Bytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecords:
    """A corpus that `meshloom data build` wrote into the folder `path`.

    The other attributes are those of `Text`, and documents with the same names are
    split the same way. `eval_path` and `test_path` are corpora built with the same
    tokenizer.
    """

    path: str
    length: int
    holdout: float | None = None
    eval_path: str | None = None
    test_holdout: float = 0.0
    test_path: str | None = None
    separate_documents: bool = False

    def __post_init__(self):
        check_held_out(self)
        check_positive(self, "length")

    def open(self, split: Split) -> PackedDataset:
        check_split(self, split)
        what = f"ArrayRecords(path='{self.path}')"
        own_path = getattr(self, f"{split}_path", None)
        if own_path:
            what = f"ArrayRecords({split}_path='{own_path}')"
        corpus = corpus_files.Corpus(own_path or self.path, what=what)
        tokens = corpus.index["tokens"]
        if own_path:
            self._check_tokenizer(corpus.manifest, what)
            spans = [Span(i, 0, int(n)) for i, n in enumerate(tokens)]
        else:
            keys = corpus.index["key"].tolist()
            spans = holdout_of(self).select(keys, tokens, split, what)
        sizes = corpus.index["bytes"]
        num_bytes = [sizes[s.document] * len(s) / tokens[s.document] for s in spans]
        return PackedDataset(
            np.array([len(span) for span in spans], np.int64),
            lambda i, start, stop: corpus.read(
                spans[i].document, spans[i].start + start, spans[i].start + stop
            ),
            end=corpus.manifest["end"],
            length=self.length,
            num_bytes=round(sum(num_bytes)),
            separate_documents=self.separate_documents,
            what=f"{what}, split '{split}'",
            about={
                "source": "ArrayRecords",
                "path": own_path or self.path,
                "split": split,
                "vocab_size": corpus.manifest["vocab_size"],
                "digest": corpus.manifest["digest"],
            },
        )

    def _check_tokenizer(self, manifest: dict[str, Any], what: str) -> None:
        train = corpus_files.load_manifest(
            self.path, what=f"ArrayRecords(path='{self.path}')"
        )
        if manifest["tokenizer"] != train["tokenizer"]:
            raise ValueError(
                f"{what}: it was built with a different tokenizer than '{self.path}' "
                f"({manifest['tokenizer']}, not {train['tokenizer']}). Build both with "
                "the same --tokenizer."
            )

    def tokenizer(self) -> Tokenizer:
        return corpus_files.load_tokenizer(
            self.path, what=f"ArrayRecords(path='{self.path}')"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Random walks on a graph; each token has `branches` equally likely successors.

    The lowest possible loss is ln(branches), and a good model comes close to it. All
    splits are walks on the same graph and share no example. The test split is as large
    as the eval split.
    """

    vocab_size: int
    length: int
    num_examples: int = 65536
    num_eval_examples: int = 1024
    branches: int = 4
    seed: int = 0

    def __post_init__(self):
        for name in ("vocab_size", "length", "num_examples", "num_eval_examples"):
            check_positive(self, name)
        if not 1 <= self.branches <= self.vocab_size:
            raise ValueError(
                f"Synthetic: branches is {self.branches}; expected 1 to vocab_size "
                f"({self.vocab_size})."
            )

    def open(self, split: Split) -> "SyntheticDataset":
        check_split(self, split)
        return SyntheticDataset(self, split)


class SyntheticDataset:
    """The opened `Synthetic` source."""

    unit = "tokens"

    def __init__(self, source: Synthetic, split: Split):
        self._source = source
        self._split = split
        self.units_per_example = source.length
        tokens = np.arange(source.vocab_size)
        self._successors = shuffle.permute(
            tokens, source.vocab_size, shuffle.keys(source.seed, tokens * 0)
        ).tolist()

    def __len__(self) -> int:
        train = self._split == "train"
        return self._source.num_examples if train else self._source.num_eval_examples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of a dataset of {len(self)} examples")
        source = self._source
        # Odd numbers are keys of the train split and even ones of the eval split. The
        # test split has even numbers that no eval split reaches.
        number = 1 + 2 * i + (self._split != "train")
        if self._split == "test":
            number += 2**62
        key = shuffle.keys(source.seed, number)
        draws = shuffle.mix(key + np.arange(source.length + 1).astype(np.uint64))
        token = int(draws[0] % np.uint64(source.vocab_size))
        tokens = [token]
        for branch in (draws[1:] % np.uint64(source.branches)).tolist():
            token = self._successors[(token + branch) % source.vocab_size]
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
