"""Sums over a held-out split, and the metrics made of them."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..data import Dataset, Order
from ..data.batches import Shardings, device_batches
from ..program.state import State

# How many evaluation steps may be dispatched ahead of the devices.
IN_FLIGHT = 4

Sums = dict[str, float]


def batch_sums(
    eval_fn: Callable[[Any, Any], dict[str, jax.Array]],
    state: State,
    data: Dataset,
    *,
    batch_size: int,
    shardings: Shardings,
    num_batches: int,
    done: Callable[[int], None] = lambda _: None,
) -> list[Sums]:
    """Returns the sums of each of the first batches of a split, in its own order.

    Args:
      done: called with the number of batches whose sums have arrived.
    """
    running: collections.deque[dict[str, jax.Array]] = collections.deque()
    results: list[Sums] = []

    def fetch(max_running: int) -> None:
        while len(running) > max_running:
            sums = jax.device_get(running.popleft())
            results.append({name: float(value) for name, value in sums.items()})
            done(len(results))

    with device_batches(
        data,
        Order(len(data), shuffle=False),
        batch_size=batch_size,
        shardings=shardings,
        start=0,
        stop=num_batches,
        training=False,
        num_examples=len(data),
    ) as batches:
        for batch in batches:
            running.append(eval_fn(state, batch))
            fetch(IN_FLIGHT)
    fetch(0)
    return results


def totals(rows: Sequence[Mapping[str, float]]) -> Sums:
    """Adds in double precision, so the number of batches does not matter."""
    return {name: math.fsum(row[name] for row in rows) for name in rows[0]}


def means(sums: Mapping[str, float], data: Dataset) -> dict[str, float]:
    """Returns the mean loss without the penalty, in the units of the data too, and
    the model's other metrics."""
    others = dict(sums)
    weight = others.pop("weight")
    loss = (others.pop("loss") - others.pop("penalty", 0.0)) / weight
    units = data.loss_units(loss)
    return {"loss": loss, **units, **{k: x / weight for k, x in others.items()}}
