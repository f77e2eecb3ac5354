"""Which order the examples of a dataset have in a run."""

from collections.abc import Mapping
from typing import Any, Protocol

from .growth import GrownOrder, Part
from .mixing import MixedOrder
from .shuffle import Order


class AnyOrder(Protocol):
    """Maps example k of a run to an example of its dataset."""

    @property
    def num_examples(self) -> int: ...
    @property
    def seed(self) -> int: ...
    def index(self, k: Any, /) -> tuple[Any, Any]: ...
    def facts(self) -> dict[str, Any]: ...


def order_of(dataset: Any, seed: int, batch_size: int) -> AnyOrder:
    """Returns the order of a run: the dataset's own if it has one.

    Args:
      batch_size: rows of a step of the run; with learners, of all of them.
    """
    own = getattr(dataset, "order", None)
    return Order(len(dataset), seed) if own is None else own(seed, batch_size)


def order_from(num_examples: int, seed: int, facts: Mapping[str, Any]) -> AnyOrder:
    """Returns the order that a ledger describes."""
    if mixture := facts.get("mixture"):
        phases = tuple((start, tuple(slots)) for start, slots in mixture["phases"])
        return MixedOrder(tuple(mixture["sizes"]), phases, seed)
    if parts := facts.get("parts"):
        return GrownOrder(tuple(Part(*part) for part in parts), seed)
    return Order(num_examples, seed)
