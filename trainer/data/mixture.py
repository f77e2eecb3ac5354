"""A source that mixes others by weights."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import mixing
from .documents import Split
from .sources import Dataset, Source, open_source, throughput_unit
from .splits import check_split
from .tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Examples of several sources of the same form, in shares that weights give.

    Attributes:
      sources: {name: source}.
      weights: {name: weight}, relative to each other.
      weights_from: {step: weights}, each for the steps after that many updates.
    """

    sources: Mapping[str, Source]
    weights: Mapping[str, float]
    weights_from: Mapping[int, Mapping[str, float]] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self):
        if not self.sources:
            raise ValueError("Mixture: sources is empty; name at least one.")
        for name in self.sources:
            if not name.isidentifier():
                raise ValueError(
                    f"Mixture: sources: {name!r} is not a word; its share is the "
                    "metric share_NAME. Choose another name."
                )
        self._places("weights", self.weights)
        for step, weights in self.weights_from.items():
            if step < 1:
                raise ValueError(
                    f"Mixture: weights_from: step {step} must be >= 1; those of the "
                    "first step are in weights."
                )
            self._places(f"weights_from {step}", weights)

    def _places(self, setting: str, weights: Mapping[str, float]) -> tuple[int, ...]:
        what = f"Mixture: {setting}"
        if weights.keys() != self.sources.keys():
            raise ValueError(
                f"{what} names {', '.join(weights) or 'nothing'}, but the sources are "
                f"{', '.join(self.sources)}. Give a weight for each; 0 for none."
            )
        for name, weight in weights.items():
            if not (weight >= 0 and math.isfinite(weight)):
                raise ValueError(f"{what}: '{name}' is {weight}; it must be >= 0.")
        if not any(weights.values()):
            raise ValueError(f"{what} are all 0; give one source a weight.")
        return mixing.places({name: weights[name] for name in self.sources}, what)

    def open(self, split: Split) -> "MixedDataset":
        check_split(self, split)
        sources = self.sources.items()
        parts = {name: open_source(source, split) for name, source in sources}
        changes = {0: self.weights, **dict(sorted(self.weights_from.items()))}
        phases = {step: self._places("weights", x) for step, x in changes.items()}
        return MixedDataset(parts, phases, split)

    @property
    def length(self) -> int:
        """Tokens per example, if all sources are text."""
        lengths = {getattr(source, "length", None) for source in self.sources.values()}
        if None in lengths or len(lengths) > 1:
            raise AttributeError("length")
        return lengths.pop()  # type: ignore

    @property
    def tokenizer(self) -> Any:
        """What `Text.tokenizer` is, if all sources are text."""
        makes = {n: getattr(x, "tokenizer", None) for n, x in self.sources.items()}
        if None in makes.values():
            raise AttributeError("tokenizer")

        def tokenizer() -> Tokenizer:
            made = {name: make() for name, make in makes.items()}  # type: ignore
            first = next(iter(made))
            for name, each in made.items():
                if _identity(each) != _identity(made[first]):
                    raise ValueError(
                        f"Mixture: '{name}' has another tokenizer than '{first}'. "
                        "Build both with the same --tokenizer."
                    )
            return made[first]

        return tokenizer


def _identity(tokenizer: Tokenizer) -> Any:
    return type(tokenizer), getattr(tokenizer, "digest", None), tokenizer.vocab_size


class MixedDataset:
    """The opened source: the examples of the first source, then of the next.

    Held-out splits are evaluated in the order of their examples, so there the sources
    take turns, each by its size.
    """

    def __init__(
        self,
        parts: Mapping[str, Dataset],
        phases: Mapping[int, tuple[int, ...]],
        split: Split,
    ):
        self.parts, self._phases, self._split = dict(parts), phases, split
        sizes = [len(part) for part in parts.values()]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._datasets = list(parts.values())
        self._turns = None if split == "train" else _turns(sizes)
        self._check_form()
        units = {throughput_unit(part) for part in self._datasets}
        same = units.pop() if len(units) == 1 else ("examples", 1)
        self.unit, self.units_per_example = same
        if any(hasattr(part, "example") for part in self._datasets):
            self.example = self._example

    def _check_form(self) -> None:
        forms = {
            name: {k: f"{x.dtype}{list(x.shape)}" for k, x in sorted(part[0].items())}
            for name, part in self.parts.items()
        }
        (first, form), *others = forms.items()
        for name, other in others:
            if other != form:
                raise ValueError(
                    f"Mixture: '{name}' has the arrays {_arrays(other)}, but '{first}' "
                    f"has {_arrays(form)}. Mix sources of the same form."
                )

    def order(self, seed: int, batch_size: int) -> mixing.MixedOrder:
        """Returns the order of a run with batches of this size."""
        phases = tuple((step * batch_size, x) for step, x in self._phases.items())
        return mixing.MixedOrder(self._sizes, phases, seed)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self._datasets)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _find(self, i: int) -> tuple[Dataset, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of a dataset of {len(self)} examples")
        if self._turns is not None:
            i = int(self._turns[i])
        number = int(np.searchsorted(self._ends, i, side="right"))
        return self._datasets[number], i - int(self._ends[number - 1] if number else 0)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        dataset, number = self._find(i)
        return dataset[number]

    def _example(self, i: int, epoch: int) -> dict[str, np.ndarray]:
        dataset, number = self._find(i)
        own: Any = getattr(dataset, "example", None)
        return dataset[number] if own is None else own(number, epoch)

    def describe(self) -> dict[str, Any]:
        about = {name: part.describe() for name, part in self.parts.items()}
        most = {
            fact: max(facts[fact] for facts in about.values() if fact in facts)
            for fact in ("vocab_size", "num_classes")
            if any(fact in facts for facts in about.values())
        }
        slots = self._phases[0]
        return {
            "source": "Mixture",
            "split": self._split,
            **{
                name: f"{len(part):,} examples, share {count / sum(slots):.4g}"
                for (name, part), count in zip(self.parts.items(), slots, strict=True)
            },
            **most,
            "examples": len(self),
        }

    def loss_units(self, loss: float) -> dict[str, float]:
        del loss
        return {}


def _turns(sizes: list[int]) -> np.ndarray:
    """Returns an order in which every beginning has each source by its size."""
    when = [(np.arange(size) + 0.5) / size for size in sizes]
    return np.argsort(np.concatenate(when), kind="stable")


def _arrays(form: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in form.items())
