"""Adds up staged contributions, block by block: what a merger sends on.

Whoever adds the same contributions gets the same bits: they are added in order of their
keys, with the arithmetic of a merge.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..blocks.layout import Layout
from ..wire.sums import Key, Tree, key_of, sums_in
from .merging import Addend, mean_of
from .staging import Pool, Staging

Summed = tuple[int, int, tuple[int, ...], np.ndarray]


def summed(
    staging: Staging,
    layout: Layout,
    blocks: Sequence[int],
    coefficients: Mapping[Key, float],
) -> Iterator[Summed]:
    """Yields (block, slab, start, array) of the sum of coefficient x contribution.

    Refuses at once what has not arrived for these blocks.
    """
    found = [
        (staging.complete(k, blocks), coefficients[k]) for k in sorted(coefficients)
    ]

    def pieces() -> Iterator[Summed]:
        for block in blocks:
            addends = [Addend(s.arrays(block), c) for s, c in found]
            # The pool is new: whoever sends an array may keep it for a while.
            total = mean_of(addends, 1.0, addends[0].arrays, Pool())
            slabs = layout.blocks[block].slabs
            for i, (slab, array) in enumerate(zip(slabs, total, strict=True)):
                if array.size:
                    yield block, i, slab.box.start, array

    return pieces()


def stage_sums(
    staging: Staging,
    layout: Layout,
    blocks: Sequence[int],
    trees: Iterable[Tree],
    coefficients: Mapping[Key, float],
) -> list[Key]:
    """Stages the sums of a commit, given its contributions; returns their keys.

    A replay computes by it what mergers have sent.
    """
    made: list[Key] = []
    for tree in (part for whole in trees for part in sums_in(whole)):
        keys = map(key_of, tree["of"])
        parts = {key: coefficients.get(key, 1.0) for key in keys}  # 1: of a sum
        key = key_of(tree)
        for block, slab, start, array in summed(staging, layout, blocks, parts):
            staging.add(key, block, slab, start, array)
        made.append(key)
    return made
