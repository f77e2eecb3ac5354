"""`meshloom predict`: what a trained model says about every example of some files."""

import collections
import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding import Sharder
from ..checkpoint.inspect import Stored
from ..config.tree import label
from ..data import Order
from ..data.batches import SAMPLE_IDS, check_dtype, device_batches
from ..program import contract
from ..program.build import Batch, placed_batch
from ..program.computation import plain
from ..program.rules import name_settings
from ..program.state import make_layout
from . import trained
from .evaluating import IN_FLIGHT
from .inputs import Inputs
from .prepare import batch_shapes

if TYPE_CHECKING:
    from .train import Config


class Padded:
    """The examples, and the first one again until full batches have a row each."""

    def __init__(self, inputs: Inputs, batch_size: int):
        self._inputs = inputs
        self._length = math.ceil(len(inputs) / batch_size) * batch_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self._inputs.example(i if i < len(self._inputs) else 0)

    def describe(self) -> dict[str, Any]:
        return {}

    def loss_units(self, loss: float) -> dict[str, float]:
        del loss
        return {}


def predictions(
    config: "Config",
    stored: Stored,
    inputs: Inputs,
    mesh: Mesh,
    *,
    batch_size: int | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the predictions of one batch after the other, without padding.

    Args:
      batch_size: rows of a batch; None for that of the run. It is rounded up to what
        the mesh needs.
    """
    contract.check(config.model)
    contract.check_predicts(config.model)
    trained.refuse_pipe(mesh, "meshloom predict")
    rules = plain(config).make_rules()
    model, shard = config.model, Sharder(mesh, rules)
    with name_settings(config):
        layout = make_layout(model, optax.identity(), rules, mesh)
        multiple = trained.row_multiple(model, rules, mesh)
        rows = min(batch_size or config.batch_size, len(inputs))
        rows = math.ceil(rows / multiple) * multiple
        first = inputs.example(0)
        for name, x in first.items():
            check_dtype(name, x.dtype)
        shapes = batch_shapes(first, rows)
        del shapes[SAMPLE_IDS]
        batch = placed_batch(model, shapes, rules, mesh)
    _check(config, layout.abstract, batch)

    def predict(state, batch):
        return contract.predict(model, state.params, batch, shard, state.variables)

    compiled = jax.jit(predict, out_shardings=NamedSharding(mesh, P()))
    state = trained.restore(stored, layout, mesh)
    shardings = {name: x.sharding for name, x in batch.items()}
    data = Padded(inputs, rows)
    with device_batches(
        data,
        Order(len(data), shuffle=False),
        batch_size=rows,
        shardings=shardings,  # type: ignore
        start=0,
        stop=len(data) // rows,
        training=False,
    ) as batches:
        found = _in_flight(functools.partial(compiled, state), batches)
        for number, result in enumerate(found):
            left = len(inputs) - number * rows
            yield {name: np.asarray(x)[:left] for name, x in result.items()}


def _in_flight(step: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Yields results in order, while the devices compute the next ones."""
    running: collections.deque[Any] = collections.deque()
    for batch in batches:
        running.append(step(batch))
        if len(running) > IN_FLIGHT:
            yield jax.device_get(running.popleft())
    while running:
        yield jax.device_get(running.popleft())


def _check(config: "Config", state: Any, batch: Batch) -> None:
    """Raises ValueError for inputs that the model cannot use, from shapes alone."""
    given: Mapping[str, str] = {
        name: f"{x.dtype}{list(x.shape)}" for name, x in batch.items()
    }
    listed = ", ".join(f"{name} {shape}" for name, shape in given.items())
    remedy = f"The inputs have {listed}; give the model the arrays it was trained on."
    predict = functools.partial(contract.predict, config.model, shard=Sharder())
    try:
        jax.eval_shape(
            lambda state, batch: predict(
                state.params, batch, variables=state.variables
            ),
            state,
            batch,
        )
    except KeyError as error:
        raise ValueError(
            f"{label(type(config.model))} needs an array {error} to predict. {remedy}"
        ) from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError) and "predict returned" in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{label(type(config.model))} cannot predict on these inputs ({reason}). "
            f"{remedy}"
        ) from error
