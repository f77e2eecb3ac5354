"""Tests that the pieces of a box are its elements, each in the right block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.service.blocks.layout import Box, Leaf, make_layout
from meshloom.service.blocks.pieces import pieces


@settings(deadline=None)
@given(st.data())
def test_pieces_cover_a_box_exactly_once(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    leaf = Leaf("w", shape, "float32", (None,) * len(shape))
    other = Leaf("b", (3,), "float32", (None,))
    layout = make_layout([other, leaf], block_bytes=data.draw(st.integers(1, 99)))
    starts = [data.draw(st.integers(0, n)) for n in shape]
    stops = [data.draw(st.integers(a, n)) for a, n in zip(starts, shape, strict=True)]
    box = Box(tuple(starts), tuple(stops))
    count = np.zeros(shape, int)
    for block, slab, part in pieces(layout, 1, box):
        found = layout.blocks[block].slabs[slab]
        assert found.leaf == 1 and found.box.contains(part)
        count[part.slices()] += 1
    expected = np.zeros(shape, int)
    expected[box.slices()] = 1
    assert (count == expected).all()


def test_a_column_of_a_divided_leaf_has_a_piece_in_every_block():
    leaf = Leaf("w", (4, 6), "float32", (None, None))
    layout = make_layout([leaf], block_bytes=48)
    found = pieces(layout, 0, Box((0, 2), (4, 3)))
    assert found == [(0, 0, Box((0, 2), (2, 3))), (1, 0, Box((2, 2), (4, 3)))]


def test_a_box_outside_of_the_leaf_is_refused():
    layout = make_layout([Leaf("w", (4,), "float32", (None,))])
    with pytest.raises(ValueError, match=r"w\[0:5\] is outside of the shape \(4,\)"):
        pieces(layout, 0, Box((0,), (5,)))
