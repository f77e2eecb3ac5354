"""Pieces: the parts of a box of a leaf that lie in different blocks."""

from .box import Box
from .layout import Layout


def pieces(layout: Layout, leaf: int, box: Box) -> list[tuple[int, int, Box]]:
    """Returns which parts of a box lie in which block.

    Args:
      leaf: index of the leaf.
      box: of the leaf's elements, for instance those that one device holds.

    Returns:
      (block index, slab index in the block, box in the coordinates of the leaf), in
      the order of the blocks. Every element of `box` is in exactly one of them.
    """
    if not Box.whole(layout.leaves[leaf].shape).contains(box):
        raise ValueError(
            f"{layout.leaves[leaf].path}{box} is outside of the shape "
            f"{layout.leaves[leaf].shape}"
        )
    found = []
    for block, slab, slab_box in layout.slabs_of[leaf]:
        part = slab_box.intersect(box)
        if part is not None:
            found.append((block, slab, part))
    return found
