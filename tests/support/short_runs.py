"""A config on some of the eight devices, prepared and trained by the loop."""

import dataclasses
import math

import jax
import numpy as np

from meshloom.sharding import MeshSpec
from meshloom.trainer import data
from meshloom.trainer.data.batches import device_batches
from meshloom.trainer.run import loop, train
from meshloom.trainer.run import prepare as prepare_lib


def prepare(config: train.Config, mesh: str, **changes) -> prepare_lib.Prepared:
    spec = MeshSpec.parse(mesh)
    config = dataclasses.replace(config, mesh=spec, **changes)
    num_devices = math.prod(spec.abstract().axis_sizes)
    return prepare_lib.prepare(config, jax.devices()[:num_devices])


def run(prepared: prepare_lib.Prepared, step_fn, num_steps: int | None = None):
    """(parameters at step 0, losses, the last state), layers in their own order."""
    config, layout, mesh = prepared.config, prepared.layout, prepared.mesh
    num_steps = num_steps or config.num_steps
    state = layout.create(jax.random.key(config.seed), mesh)
    initial = jax.device_get(layout.canonical(state, mesh).params)
    check_sharded(prepared, state)
    rows = []
    with device_batches(
        prepared.train_data,
        data.Order(len(prepared.train_data), config.seed),
        batch_size=config.batch_size,
        shardings=prepared.program.batch_shardings,
        start=0,
        stop=num_steps,
    ) as batches:
        state = loop.run(
            step_fn,
            state,
            batches,
            start=0,
            num_steps=num_steps,
            record=rows.extend,
        )
    check_sharded(prepared, state)
    losses = np.array([row["loss"] for row in rows])
    return initial, losses, layout.canonical(state, mesh)


def check_sharded(prepared: prepare_lib.Prepared, state) -> None:
    """Each array's local piece has the size the plan promises."""
    for part in ("params", "opt_state", "variables"):
        for resolved, array in zip(
            getattr(prepared.layout, part).arrays,
            jax.tree.leaves(getattr(state, part)),
            strict=True,
        ):
            piece = array.addressable_shards[0].data
            assert piece.size * resolved.ways == array.size, resolved.path
