"""The stored order of layers, given stages and chunks."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.sharding.pipeline import layer_order, reorder

pytestmark = pytest.mark.compiles_anew


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "expected"),
    [
        (4, 2, 1, [[0, 1], [2, 3]]),
        (8, 2, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (8, 4, 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (12, 2, 3, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
    ],
)
def test_each_stage_stores_its_chunks_in_sequence(layers, stages, chunks, expected):
    order = layer_order(layers, stages, chunks)
    # The stack is sharded over the stages in equal parts.
    assert order.reshape(stages, -1).tolist() == expected


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 3), (3, 2), (4, 3)])
def test_a_microbatch_passes_the_layers_in_their_order(stages, chunks):
    layers = 2 * stages * chunks
    held = layer_order(layers, stages, chunks).reshape(stages, chunks, -1)
    met = [held[s, r].tolist() for r in range(chunks) for s in range(stages)]
    assert sum(met, []) == list(range(layers))


def test_one_chunk_keeps_the_order_of_the_stack():
    np.testing.assert_array_equal(layer_order(12, 4, 1), np.arange(12))


def tree():
    w = jnp.arange(8 * 3).reshape(8, 3)
    table = jnp.arange(8.0)
    axes = {"blocks": {"w": ("layer", "embed")}, "table": ("vocab",), "scalar": ()}
    return {"blocks": {"w": w}, "table": table, "scalar": jnp.ones(())}, axes


def test_only_stacks_of_layers_are_reordered():
    before, axes = tree()
    order = layer_order(8, 2, 2)
    after = reorder(before, axes, order)
    np.testing.assert_array_equal(after["blocks"]["w"], before["blocks"]["w"][order])
    assert after["table"] is before["table"]
    assert after["scalar"] is before["scalar"]


def test_the_inverse_order_restores_the_tree():
    before, axes = tree()
    order = layer_order(8, 4, 2)
    # With 2 stages of 2 chunks, the order would be its own inverse.
    assert not np.array_equal(order, np.argsort(order))
    back = reorder(reorder(before, axes, order), axes, np.argsort(order))
    np.testing.assert_array_equal(back["blocks"]["w"], before["blocks"]["w"])
