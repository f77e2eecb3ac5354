"""What the modes that `meshloom rounds compare` trains have in common."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...service.blocks.layout import Layout, make_layout
from ...service.rounds.policy import Policy
from ...sharding import MeshSpec, parse_plan
from ..data import open_source, order_of
from ..data.batches import SAMPLE_IDS, Batches, Share
from ..data.shuffle import Order
from ..program.build import Program, build
from ..program.schedules import make_rate
from ..run import exchange as exchange_lib
from ..run.held_out import with_weights

EVAL_ROWS = 256


class Task:
    """What all modes have in common: the model, its Program and the data."""

    def __init__(self, config: Any, num_learners: int, eval_rows: int = EVAL_ROWS):
        """Args:
        config: of a run; `batch_size` is that of one step over all learners.
        eval_rows: held-out examples that a loss is the mean of, at most.
        """
        self.config, self.num_learners = config, num_learners
        self.rows = Share(0, num_learners).size(config.batch_size)
        data = with_weights(config, open_source(config.data, "train"))
        held_out = with_weights(config, open_source(config.data, "eval"))
        order = order_of(data, config.seed, config.batch_size)
        self._batches = Batches(data, order, self.rows)
        num_eval = min(len(held_out), eval_rows) // self.rows
        if not num_eval:
            raise ValueError(
                f"the held-out split has {len(held_out)} examples, fewer than the "
                f"{self.rows} rows of a learner's batch; lower batch_size"
            )
        order = Order(len(held_out), config.seed)
        held_out_batches = Batches(held_out, order, self.rows, training=False)
        mesh = MeshSpec(data=1).make(jax.devices()[:1])
        first = {name: np.asarray(x) for name, x in self._batches[0].items()}
        shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in first.items()}
        shapes[SAMPLE_IDS] = jax.ShapeDtypeStruct((self.rows,), jnp.uint32)
        self.program: Program = build(
            config.model,
            config.optimizer,
            mesh,
            parse_plan("data"),
            shapes,
            learning_rate=make_rate(config.schedule, config.num_steps),
            seed=config.seed,
            max_grad_norm=config.max_grad_norm,
            facts=data.describe(),
            donate=False,
        )
        self.initial = self.program.init(jax.random.key(config.seed))
        self._held_out = [
            self._placed(held_out_batches, step) for step in range(num_eval)
        ]

    def batch(self, block: int) -> dict[str, jax.Array]:
        """Returns a block of the data: the batch of one step of one learner."""
        return self._placed(self._batches, block)

    def _placed(self, batches: Batches, number: int) -> dict[str, jax.Array]:
        arrays = batches[number]
        arrays[SAMPLE_IDS] = batches.sample_ids(number).astype(np.uint32)
        return jax.device_put(arrays, self.program.batch_shardings)

    def loss(self, leaves: list[np.ndarray]) -> float:
        """Returns the held-out loss of parameters."""
        state = self.initial._replace(params=self.params(leaves))
        sums = [self.program.evaluate(state, batch) for batch in self._held_out]
        total = sum(float(s["loss"]) for s in sums)
        return total / sum(float(s["weight"]) for s in sums)

    def params(self, leaves: list[np.ndarray]) -> Any:
        structure = jax.tree.structure(self.initial.params)
        params = jax.tree.unflatten(structure, leaves)
        return jax.device_put(params, self.program.shardings.params)

    def make_layout(self, policy: Policy) -> Layout:
        layout = self.program.layout
        found = exchange_lib.exchanged(
            exchange_lib.Config(), layout.abstract.params, layout.axes.params
        )
        kind = type(self.config.optimizer)
        granularity = kind.granularity if policy.outer is None else None
        return make_layout(
            [leaf for _, leaf in found],
            granularity=granularity or "element",
            fragments=policy.fragments,
        )
