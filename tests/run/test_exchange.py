"""The exchange node of a config, and what a learner tells the service."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import TINY

from meshloom.service.blocks.pieces import pieces
from meshloom.service.learner import shards
from meshloom.service.learner.merging import Merging
from meshloom.trainer.config import files as config_files
from meshloom.trainer.data.batches import Batches
from meshloom.trainer.data.shuffle import Order
from meshloom.trainer.program.step import Gradients
from meshloom.trainer.run import exchange
from meshloom.trainer.run.error_feedback import residual_of
from meshloom.trainer.run.exchange_update import make_update, update_spec
from meshloom.trainer.run.exchanged import Exchanged
from meshloom.trainer.run.prepare import prepare
from meshloom.trainer.run.train import Config


def tiny_config(**changes) -> Config:
    config = config_files.load([TINY], root=Config).config
    return dataclasses.replace(config, **changes)


def learner(config, **settings):
    settings = {"address": "localhost:1", "learners": 2} | settings
    return dataclasses.replace(config, exchange=exchange.Config(**settings))


def test_blocks_of_the_data_are_rows_of_batches_in_order():
    """Block 3 * k + i is the i-th third of batch k: what `data=3` trains there."""
    order = Order(50, seed=3)
    whole = Batches(list(range(50)), order, 12).sample_ids(2)
    blocks = Batches(list(range(50)), order, 4)
    parts = [blocks.sample_ids(3 * 2 + i) for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"learner": 2}, "learner 2 is not one of 2"),
        ({"mode": "dilocco"}, "'dilocco' is not a mode; expected one of sync"),
        ({"quorum": 3, "mode": "backup-workers"}, "quorum=3 is larger"),
        ({"paths": ("blocks/*",)}, "would never be trained"),
        ({"outer_momentum": 0.9}, "has no outer optimizer"),
        ({"block_bytes": 0}, "block_bytes must be >= 1, got 0"),
        ({"pull": "int4"}, "pull='int4' is not a compression; expected float32"),
        ({"pull": "topk:0.1"}, "pull='topk:0.1': top-k is for `push` only; expected f"),
        ({"copies": 3}, "copies must be 1 or 2, got 3"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        exchange.Config(**{"address": "localhost:1", "learners": 2} | settings)


def test_a_batch_that_the_learners_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="not divisible by 3 learners; 18 would be"):
        dataclasses.replace(
            tiny_config(batch_size=16), exchange=exchange.Config(learners=3)
        )


def test_settings_without_an_address_are_mentioned():
    config = tiny_config()
    alone = dataclasses.replace(config, exchange=exchange.Config(mode="diloco"))
    lines = prepare(alone, jax.devices()[:1]).describe()
    assert any("exchange settings have no effect" in line for line in lines)
    assert not any(
        "exchange" in line for line in prepare(config, jax.devices()[:1]).describe()
    )


def test_where_servers_run_the_optimizer_a_learner_has_no_state_of_it():
    config = tiny_config()
    sends_gradients = prepare(learner(config), jax.devices()[:2])
    has_own = prepare(learner(config, mode="diloco", local_steps=5), jax.devices()[:2])
    assert not jax.tree.leaves(sends_gradients.layout.abstract.opt_state)
    assert jax.tree.leaves(has_own.layout.abstract.opt_state)
    assert sends_gradients.batch_size == config.batch_size // 2
    # And it compiles what it runs.
    assert isinstance(sends_gradients.lowered.out_info, Gradients)
    assert not isinstance(has_own.lowered.out_info, Gradients)


def test_smaller_blocks_spread_a_small_model():
    config = tiny_config()
    prepared = prepare(learner(config), jax.devices()[:1])
    shapes, axes = prepared.layout.abstract.params, prepared.layout.axes.params
    one, many = (
        exchange.block_layout(
            learner(config, **more).exchange, config.optimizer, shapes, axes
        )
        for more in ({}, {"block_bytes": 2048})
    )
    assert len(one.blocks) == 1 and len(many.blocks) > 8
    assert max(many.block_bytes(block.index) for block in many.blocks) <= 2048


def test_an_optimizer_that_servers_do_not_know_is_refused_by_name():
    class Mine:
        pass

    config = learner(tiny_config())
    with pytest.raises(ValueError, match="Mine cannot run on the servers"):
        update_spec(dataclasses.replace(config, optimizer=Mine()))
    with pytest.raises(ValueError, match="Mine does not say how finely"):
        shapes = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
        exchange.block_layout(config.exchange, Mine(), shapes, {"w": ("a", "b")})
    spec = update_spec(config)
    spec["optimizer"]["name"] = "os.system"
    with pytest.raises(ValueError, match="'os.system' is not one that this server"):
        make_update(spec)


def test_a_fragment_is_merged_with_its_share_and_nothing_else_changes():
    """On a sharded mesh: base, mix and change of every element, by hand."""
    base = learner(
        tiny_config(), mode="streaming-diloco", local_steps=8, fragments=2, mix=0.25
    )
    spec = dataclasses.replace(base.mesh, data=2, fsdp=2, tensor=2)
    config = dataclasses.replace(base, mesh=spec)
    prepared = prepare(config, jax.devices()[:8])
    shapes, axes = prepared.layout.abstract.params, prepared.layout.axes.params
    layout = exchange.block_layout(config.exchange, config.optimizer, shapes, axes)
    exchanged = Exchanged(prepared, config.exchange)

    def read(version, buffers, fragment, base):
        for (leaf, box), buffer in buffers.items():
            for block, _, part in pieces(layout, leaf, box):
                if fragment in (None, layout.fragment_of(block)):
                    buffer[part.slices(box)] = version
        return 0

    merging = Merging(exchanged, layout, read, 0.25)
    state = prepared.layout.create(jax.random.key(0), prepared.mesh)
    state = merging.replace(state, merging.fetch(8, None)[0])
    assert all(
        not x.sharding.is_fully_replicated
        for x in exchanged.of(state.params).values()
        if x.ndim > 2
    )
    state = merging.merge(state, merging.fetch(16, 1)[0], 1)
    arrays = exchanged.of(state.params)
    change = {key: merging.base[key] - x for key, x in shards.to_host(arrays).items()}
    seen = set()
    for (leaf, box), found in change.items():
        for block, _, part in pieces(layout, leaf, box):
            fragment = layout.fragment_of(block)
            seen.add(fragment)
            expected = 16 - (8 + 0.25 * 8) if fragment == 1 else 0.0
            np.testing.assert_array_equal(found[part.slices(box)], expected)
    assert seen == {0, 1}


def test_only_what_is_exchanged_has_a_residual():
    """On a sharded mesh, with a pipeline order of its own for neither side."""
    base = learner(
        tiny_config(),
        **{"mode": "local-sgd", "local_steps": 4, "push": "topk:0.1"},
        paths=("blocks/*",),
    )
    spec = dataclasses.replace(base.mesh, data=2, fsdp=2, tensor=2)
    prepared = prepare(dataclasses.replace(base, mesh=spec), jax.devices()[:8])
    exchanged = Exchanged(prepared, base.exchange)
    state = prepared.layout.create(jax.random.key(0), prepared.mesh)
    own = jax.tree.leaves(residual_of(state))
    sent = exchanged.of(state.params)
    assert 0 < len(own) == len(sent) < len(jax.tree.leaves(state.params))
    residual = exchanged.residual(state)
    assert {k: x.shape for k, x in residual.items()} == {
        k: x.shape for k, x in sent.items()
    }
    assert not any(np.asarray(x).any() for x in residual.values())
    changed = exchanged.put_residual(state, {k: x + k for k, x in residual.items()})
    for leaf, x in exchanged.residual(changed).items():
        np.testing.assert_array_equal(x, np.full(x.shape, leaf))
        assert x.sharding.is_equivalent_to(sent[leaf].sharding, x.ndim)
    assert any(not x.sharding.is_fully_replicated for x in residual.values())
    same = jax.tree.map(lambda a, b: a is b, changed.params, state.params)
    assert all(jax.tree.leaves(same))
