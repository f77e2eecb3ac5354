"""Sources: where examples come from, as nodes of the config.

A source is plain data; files are touched by `open` alone. Nothing here knows of jax.
"""

import dataclasses
import hashlib
import math
import os
from typing import Any, Protocol, get_args

import numpy as np

from . import corpus_files, documents, shuffle
from .packing import PackedDataset
from .splits import DEFAULT_HOLDOUT, Piece, Shares, Split
from .tokenizer import Bytes, Tokenizer


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
        holdout: share of the documents, chosen by a hash of the name, for evaluation;
            of a single document, its end. None for 0.05, or 0 with an eval_path.
        eval_path: the documents of the evaluation, as `path`; none of them is trained
            on, even if `path` holds them too.
        test_holdout, test_path: the same for a third split, the test.
        separate_documents: add `segments` and `positions`, so that the model keeps
            documents packed into one example apart.
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
        _check_text(self)

    def open(self, split: Split) -> PackedDataset:
        _check_split(self, split)
        named = {name: self._named(name) for name in ("eval", "test")}
        what, found = f"Text(path='{self.path}')", named.get(split)
        if found:
            pieces = [Piece(i, 0, each.num_bytes) for i, each in enumerate(found)]
        else:
            apart = {_real(each) for each in named["eval"] + named["test"]}
            found = documents.find(self.path, self.pattern, what=what)
            found = [each for each in found if _real(each) not in apart]
            sizes = np.array([each.num_bytes for each in found], np.int64)
            keys = [documents.split_key(each.name) for each in found]
            pieces = _shares(self).choose(keys, sizes, split, what)
        chosen = [found[piece.document] for piece in pieces]
        return PackedDataset(
            np.array([len(piece) for piece in pieces], np.int64),
            _FileReader(chosen, [piece.start for piece in pieces]),
            end=Bytes.end,
            length=self.length,
            num_bytes=sum(map(len, pieces)),
            separate_documents=self.separate_documents,
            what=f"{what}, split '{split}'",
            about={
                "source": "Text",
                "path": getattr(self, f"{split}_path", None) or self.path,
                "split": split,
                "vocab_size": Bytes.vocab_size,
            },
            files={each.name: each.path for each in chosen},
        )

    def _named(self, split: Split) -> list[documents.Document]:
        """The documents that a path of its own names for a split; [] without one."""
        name = f"{split}_path"
        path = getattr(self, name)
        return documents.find(path, what=f"Text({name}='{path}')") if path else []

    def tokenizer(self) -> Tokenizer:
        return Bytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecords:
    """A corpus that `meshloom data build` wrote into the folder `path`.

    The other attributes are those of `Text`; equal names give equal splits. The paths
    of other splits are built corpora of the same tokenizer.
    """

    path: str
    length: int
    holdout: float | None = None
    eval_path: str | None = None
    test_holdout: float = 0.0
    test_path: str | None = None
    separate_documents: bool = False

    def __post_init__(self):
        _check_text(self)

    def open(self, split: Split) -> PackedDataset:
        _check_split(self, split)
        what = f"ArrayRecords(path='{self.path}')"
        named = getattr(self, f"{split}_path", None)
        if named:
            what = f"ArrayRecords({split}_path='{named}')"
        built = corpus_files.Corpus(named or self.path, what=what)
        tokens = built.index["tokens"]
        if named:
            self._check_tokenizer(built.manifest, what)
            pieces = [Piece(i, 0, int(n)) for i, n in enumerate(tokens)]
        else:
            keys = built.index["key"].tolist()
            pieces = _shares(self).choose(keys, tokens, split, what)
        sizes = built.index["bytes"]
        shares = [sizes[p.document] * len(p) / tokens[p.document] for p in pieces]
        return PackedDataset(
            np.array([len(piece) for piece in pieces], np.int64),
            lambda i, start, stop: built.read(
                pieces[i].document, pieces[i].start + start, pieces[i].start + stop
            ),
            end=built.manifest["end"],
            length=self.length,
            num_bytes=round(sum(shares)),
            separate_documents=self.separate_documents,
            what=f"{what}, split '{split}'",
            about={
                "source": "ArrayRecords",
                "path": named or self.path,
                "split": split,
                "vocab_size": built.manifest["vocab_size"],
                "digest": built.manifest["digest"],
            },
        )

    def _check_tokenizer(self, manifest: dict[str, Any], what: str) -> None:
        ours = corpus_files.load_manifest(
            self.path, what=f"ArrayRecords(path='{self.path}')"
        )
        if manifest["tokenizer"] != ours["tokenizer"]:
            raise ValueError(
                f"{what}: it was built with another tokenizer than '{self.path}' "
                f"({manifest['tokenizer']}, not {ours['tokenizer']}). Build both with "
                "the same --tokenizer."
            )

    def tokenizer(self) -> Tokenizer:
        return corpus_files.load_tokenizer(
            self.path, what=f"ArrayRecords(path='{self.path}')"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
    """Walks on a random graph where each token has `branches` equally likely followers.

    No model can do better than a loss of ln(branches), and a good one comes close.
    All splits walk on the same graph and share no example. The test split is as large
    as the one for evaluation.
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
        self._followers = shuffle.permute(
            tokens, source.vocab_size, shuffle.keys(source.seed, tokens * 0)
        ).tolist()

    def __len__(self) -> int:
        train = self._split == "train"
        return self._source.num_examples if train else self._source.num_eval_examples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of a dataset of {len(self)} examples")
        source = self._source
        # Odd numbers are keys of the train split, even ones of the eval split, and
        # those that no eval split reaches, of the test split.
        number = 1 + 2 * i + (self._split != "train")
        if self._split == "test":
            number += 2**62
        key = shuffle.keys(source.seed, number)
        draws = shuffle.mix(key + np.arange(source.length + 1).astype(np.uint64))
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
    """Reads pieces of files; a file that changed since the listing is an error.

    Args:
        starts: where in each file its tokens begin.
    """

    def __init__(self, files: list[documents.Document], starts: list[int]):
        self._files, self._starts = files, starts

    def __call__(self, i: int, start: int, stop: int) -> np.ndarray:
        listed = self._files[i]
        with open(listed.path, "rb", buffering=0) as file:
            now = os.fstat(file.fileno())
            file.seek(self._starts[i] + start)
            data = file.read(stop - start)
        seen = (now.st_size, now.st_mtime_ns, len(data))
        if seen != (listed.num_bytes, listed.mtime_ns, stop - start):
            raise ValueError(
                f"'{listed.path}' was changed while it was in use ({now.st_size:,} "
                f"bytes, {listed.num_bytes:,} when it was opened). Bring back what the "
                "run began with, and start it again: it compares the contents."
            )
        return np.frombuffer(data, np.uint8)


def _real(document: documents.Document) -> str:
    return os.path.realpath(document.path)


def _shares(source: Text | ArrayRecords) -> Shares:
    """Of the documents of `path`; a split with a path of its own takes none of them."""
    default = 0.0 if source.eval_path else DEFAULT_HOLDOUT
    held_out = default if source.holdout is None else source.holdout
    return Shares(held_out, source.test_holdout)


def _check_text(source: Text | ArrayRecords) -> None:
    name = type(source).__name__
    if not source.path:
        raise ValueError(f"{name}: path is empty; name a folder.")
    _check_positive(source, "length")
    shares = {"holdout": source.holdout or 0.0, "test_holdout": source.test_holdout}
    paths = {"holdout": "eval_path", "test_holdout": "test_path"}
    for setting, share in shares.items():
        if not 0 <= share < 1:
            raise ValueError(
                f"{name}: {setting} is {share}; expected a share of the documents, at "
                "least 0 and below 1."
            )
        if share and getattr(source, paths[setting]) is not None:
            raise ValueError(
                f"{name}: {setting}={share} has no effect with {paths[setting]}, which "
                "names the documents. Leave one of them out."
            )
    if sum(shares.values()) >= 1:
        raise ValueError(
            f"{name}: holdout={source.holdout} and test_holdout={source.test_holdout} "
            "leave nothing to train on; expected less than 1 in all."
        )


def _check_positive(source: Any, name: str) -> None:
    value = getattr(source, name)
    if value < 1:
        raise ValueError(
            f"{type(source).__name__}: {name} is {value}; expected at least 1."
        )


def _check_split(source: Any, split: str) -> None:
    if split not in get_args(Split):
        raise ValueError(
            f"{type(source).__name__}: no split '{split}'; expected 'train', 'eval' or "
            "'test'."
        )
