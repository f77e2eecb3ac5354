"""Tests that layouts have every element once, and divide only where they may."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.service.blocks.layout import Box, Layout, Leaf, _deal, make_layout

AXES = st.sampled_from(["layer", None, "embed", "ff"])
SHAPES = st.lists(st.integers(0, 9), max_size=4)
DTYPES = st.sampled_from(["float32", "bfloat16"])


@st.composite
def leaf_lists(draw):
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    return [
        Leaf(f"p{i}", tuple(s), draw(DTYPES), tuple(draw(AXES) for _ in s))
        for i, s in enumerate(shapes)
    ]


def one(shape, axes=None, dtype="float32", path="w"):
    return Leaf(path, shape, dtype, axes or (None,) * len(shape))


@settings(deadline=None)
@given(leaf_lists(), st.sampled_from(["element", "matrix", "leaf"]), st.integers(1, 99))
def test_every_element_is_in_exactly_one_slab(leaves, granularity, block_bytes):
    layout = make_layout(leaves, granularity=granularity, block_bytes=block_bytes)
    counts = [np.zeros(leaf.shape, int) for leaf in leaves]
    for block in layout.blocks:
        for slab in block.slabs:
            counts[slab.leaf][slab.box.slices()] += 1
    assert all((count == 1).all() for count in counts)
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout and again.digest == layout.digest


@settings(deadline=None)
@given(leaf_lists(), st.integers(4, 99))
def test_blocks_have_at_most_the_bytes_asked_for(leaves, block_bytes):
    layout = make_layout(leaves, block_bytes=block_bytes)
    sizes = [layout.block_bytes(block.index) for block in layout.blocks]
    assert max(sizes) <= block_bytes
    fused = sum(s for s, b in zip(sizes, layout.blocks, strict=True) if len(b.slabs))
    assert fused == sum(leaf.nbytes for leaf in leaves)


@settings(deadline=None)
@given(leaf_lists(), st.integers(1, 99))
def test_matrices_and_leaves_stay_whole(leaves, block_bytes):
    layout = make_layout(leaves, granularity="matrix", block_bytes=block_bytes)
    for slab in (slab for block in layout.blocks for slab in block.slabs):
        leaf = leaves[slab.leaf]
        for dim, name in enumerate(leaf.axes):
            if name not in ("layer", None):
                assert slab.box.shape[dim] == leaf.shape[dim]
    layout = make_layout(leaves, granularity="leaf", block_bytes=block_bytes)
    slabs = [slab for block in layout.blocks for slab in block.slabs]
    assert len(slabs) == len(leaves)


def test_a_large_leaf_is_divided_along_its_leading_dimensions():
    layout = make_layout([one((6, 4, 8))], block_bytes=2 * 4 * 8 * 4)
    boxes = [block.slabs[0].box for block in layout.blocks]
    assert boxes == [Box((i, 0, 0), (i + 2, 4, 8)) for i in (0, 2, 4)]
    layout = make_layout([one((2, 4, 8))], block_bytes=2 * 8 * 4)
    assert [b.slabs[0].box.shape for b in layout.blocks] == [(1, 2, 8)] * 4


def test_small_leaves_share_a_block():
    leaves = [one((4,), path=f"p{i}") for i in range(5)]
    layout = make_layout(leaves, block_bytes=40)
    assert [[s.leaf for s in b.slabs] for b in layout.blocks] == [[0, 1], [2, 3], [4]]


@settings(deadline=None)
@given(leaf_lists(), st.integers(1, 4))
def test_fragments_differ_by_at_most_the_largest_block(leaves, num):
    try:
        layout = make_layout(leaves, fragments=num)
    except ValueError as error:
        assert "fragments <=" in str(error)
        return
    loads = [0] * num
    for block in layout.blocks:
        loads[layout.fragment_of(block.index)] += layout.block_bytes(block.index)
    largest = max(layout.block_bytes(block.index) for block in layout.blocks)
    assert max(loads) - min(loads) <= largest
    assert {layout.fragment_of(b.index) for b in layout.blocks} == set(range(num))


def test_the_emptiest_fragment_gets_the_largest_block():
    # In the order of the blocks the fragments would have 2 and 18.
    assert _deal([1, 9, 1, 9], 2) == (1, 0, 0, 1)


def test_fragments_are_strided():
    layout = make_layout([one((8, 4), ("layer", "embed"))], fragments=2)
    assert [layout.fragment_of(b.index) for b in layout.blocks] == [0, 1, 0, 1]


def test_equal_layouts_only_have_equal_digests():
    digest = make_layout([one((8, 4))]).digest
    assert digest == make_layout([one((8, 4))]).digest
    others = [
        make_layout([one((8, 4))], block_bytes=64),
        make_layout([one((4, 8))]),
        make_layout([one((8, 4), dtype="bfloat16")]),
        make_layout([one((8, 4), path="v")]),
        make_layout([one((8, 4))], fragments=2),
    ]
    assert len({digest, *(x.digest for x in others)}) == 6


def test_boxes():
    box = Box((1, 2), (4, 6))
    assert box.shape == (3, 4) and box.size == 12
    assert box.intersect(Box((3, 0), (9, 3))) == Box((3, 2), (4, 3))
    assert box.intersect(Box((4, 2), (5, 6))) is None
    assert Box((), ()).size == 1 and Box((), ()).intersect(Box((), ())) == Box((), ())
    array = np.arange(24).reshape(4, 6)
    assert (array[box.slices()] == array[1:4, 2:6]).all()
    part = array[box.slices()]
    inner = Box((2, 3), (3, 5))
    assert (part[inner.slices(inside=box)] == array[inner.slices()]).all()
    assert math.prod(Box.at((1, 1), (2, 2)).stop) == 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: one((2,), dtype="int32"), "'int32' cannot be exchanged"),
        (lambda: Leaf("w", (2, 3), "float32", ("embed",)), "w: 1 logical axes"),
        (lambda: make_layout([one((2,))], granularity="x"), "granularity 'x'"),  # type: ignore
        (lambda: make_layout([one((2,))], block_bytes=0), "block_bytes=0"),
        (lambda: make_layout([one((1,))], fragments=3), "set fragments <= 1"),
        (lambda: make_layout([one((2,)), one((2,))]), "two leaves .* 'w'"),
        (lambda: Box((2,), (1,)), "0 <= start <= stop"),
        (lambda: Layout.from_json({"leaves": []}), "not what Layout.to_json writes"),
    ],
)
def test_bad_input_gets_a_message(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([[[0, [0], [3]]]], "3 elements of w, whose shape .* has 4"),
        ([[[0, [0], [5]]]], r"block 0 has w\[0:5\], which is outside"),
        ([[[0, [0], [2]]], [[0, [0], [2]]]], r"block 1 has w\[0:2\].*another block"),
    ],
)
def test_a_layout_that_misses_elements_is_refused(blocks, message):
    data = make_layout([one((4,))]).to_json()
    data["blocks"], data["fragments"] = blocks, [0] * len(blocks)
    with pytest.raises(ValueError, match=message):
        Layout.from_json(data)
