"""Tests that devices pack what their shards have, and keep what they did not send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.service.blocks.layout import Box, Leaf, make_layout
from meshloom.service.learner.compression import Compressor
from meshloom.service.wire import codecs

LEAVES = [
    Leaf("up", (2, 64, 128), "float32", ("layer", None, None)),
    Leaf("scale", (64,), "float32", (None,)),
    Leaf("one", (), "float32", ()),
]
LAYOUT = make_layout(LEAVES, block_bytes=20_000)
MESHES = {
    "alone": ((1, 1), [P(), P(), P()]),
    "rows": ((2, 2), [P(None, "a"), P(), P()]),  # each row twice
    "columns": ((1, 2), [P(None, "a", "b"), P(), P()]),
    "layers": ((2, 2), [P("a", "b"), P(), P()]),
}


def placed(arrays, mesh):
    shape, specs = MESHES[mesh]
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return {
        leaf: jax.device_put(x, NamedSharding(mesh, spec))
        for leaf, (x, spec) in enumerate(zip(arrays, specs, strict=True))
    }


def numbers(seed, step=2.0**-6):
    """Multiples of a power of two, whose sums are exact in float32."""
    rng = np.random.default_rng(seed)
    sizes = [rng.normal(size=leaf.shape) * 4 for leaf in LEAVES]
    return [np.asarray(np.round(x / step) * step, np.float32) for x in sizes]


def whole(pieces):
    """Returns the leaves that whoever receives the pieces has; each element once."""
    found = [np.zeros(leaf.shape, np.float32) for leaf in LEAVES]
    seen = [np.zeros(leaf.shape, np.int32) for leaf in LEAVES]
    for piece in pieces:
        leaf = LAYOUT.blocks[piece.block].slabs[piece.slab].leaf
        box = Box.at(piece.start, piece.array.shape)
        found[leaf][(*box.slices(), ...)] = piece.unpacked()
        seen[leaf][(*box.slices(), ...)] += 1
    assert all((x == 1).all() for x in seen)
    return found


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_what_arrives_does_not_depend_on_the_mesh(name):
    """For int8 because all shards have a multiple of 64 columns."""
    compressor = Compressor(codecs.parse(name), LAYOUT)
    arrays = numbers(0)
    results = {
        mesh: whole(compressor.contribution(placed(arrays, mesh))[0]) for mesh in MESHES
    }
    for found in results.values():
        for a, b in zip(found, results["alone"], strict=True):
            np.testing.assert_array_equal(a, b)
    error = np.abs(results["rows"][0] - arrays[0]).max() / np.abs(arrays[0]).max()
    assert (error == 0) == (name == "float32") and error < 2.0**-7


# Each shard has programs of its own, so not all codecs on all meshes.
@pytest.mark.parametrize(
    "name, mesh",
    [
        *(("topk:0.02+int8", mesh) for mesh in MESHES),
        ("topk:0.02", "rows"),
        ("topk:0.1+bfloat16", "columns"),
    ],
)
def test_everything_is_sent_in_the_end(name, mesh):
    """What was sent so far and the residual are the sum of what there was to send."""
    compressor = Compressor(codecs.parse(name), LAYOUT)
    residual = placed([np.zeros(x.shape, np.float32) for x in LEAVES], mesh)
    total = [np.zeros(x.shape) for x in LEAVES]
    sent = [np.zeros(x.shape) for x in LEAVES]
    for step in range(5):
        arrays = numbers(step)
        pieces, residual = compressor.contribution(
            placed(arrays, mesh), residual=residual
        )
        total = [a + b for a, b in zip(total, arrays, strict=True)]
        sent = [a + b for a, b in zip(sent, whole(pieces), strict=True)]
        for leaf in range(len(LEAVES)):
            left = np.asarray(residual[leaf], np.float64)
            np.testing.assert_array_equal(sent[leaf] + left, total[leaf])
    assert np.count_nonzero(np.asarray(residual[0])) > 0.5 * LEAVES[0].nbytes / 4
    assert residual[0].sharding.is_equivalent_to(placed(total, mesh)[0].sharding, 3)


def test_the_change_of_one_fragment():
    layout = make_layout(LEAVES[:1], block_bytes=20_000, fragments=2)
    compressor = Compressor(codecs.parse("topk:1"), layout)
    now, base = numbers(0)[:1], numbers(1)[0]
    arrays = {0: placed([*now, *numbers(0)[1:]], "rows")[0]}
    boxes = {
        (0, Box((0, 32 * i, 0), (2, 32 * (i + 1), 128))): base[:, 32 * i : 32 * i + 32]
        for i in range(2)
    }
    old = {0: jax.device_put(jnp.ones(LEAVES[0].shape), arrays[0].sharding)}
    pieces, left = compressor.contribution(arrays, 1, base=boxes, residual=old)
    assert {layout.fragment_of(piece.block) for piece in pieces} == {1}
    for piece in pieces:
        index = Box.at(piece.start, piece.array.shape).slices()
        expected = base[index] - now[0][index] + 1
        np.testing.assert_array_equal(piece.unpacked(), expected)
        np.testing.assert_array_equal(np.asarray(left[0])[index], 0)
    assert np.count_nonzero(np.asarray(left[0])) == LEAVES[0].nbytes / 4 - sum(
        piece.unpacked().size for piece in pieces
    )


def test_what_is_not_finite_does_not_stay():
    compressor = Compressor(codecs.parse("topk:0.02+int8"), LAYOUT)
    arrays = numbers(0)
    arrays[0][0, 3, 5] = np.nan
    residual = placed([np.zeros(x.shape, np.float32) for x in LEAVES], "rows")
    pieces, residual = compressor.contribution(
        placed(arrays, "rows"), residual=residual
    )
    assert np.isnan(whole(pieces)[0]).any()
    assert all(np.isfinite(np.asarray(x)).all() for x in residual.values())
