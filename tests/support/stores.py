"""Contributions to a BlockStore, without any network."""

from typing import Any

import ml_dtypes
import numpy as np

from meshloom.service.blocks.box import Box
from meshloom.service.blocks.layout import Layout
from meshloom.service.blocks.pieces import pieces
from meshloom.service.server.store import BlockStore

NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def values(seed: int, layout: Layout) -> list[np.ndarray]:
    """Returns random leaves in their dtypes."""
    rng = np.random.default_rng(seed)
    return [
        np.asarray(
            rng.normal(size=leaf.shape),
            ml_dtypes.bfloat16 if leaf.dtype == "bfloat16" else np.float32,
        )
        for leaf in layout.leaves
    ]


def send(
    store: BlockStore,
    learner: int,
    round: int,
    arrays: list[np.ndarray],
    fragment: int | None = None,
    incarnation: int = 0,
) -> None:
    for leaf, array in enumerate(arrays):
        for block, slab, box in pieces(store.layout, leaf, Box.whole(array.shape)):
            is_wanted = fragment in (None, store.layout.fragment_of(block))
            if block in store.owned and is_wanted:
                piece = array[(*box.slices(), ...)]
                store.stage(learner, incarnation, round, block, slab, box.start, piece)


def row(
    learner: int, round: int, base: int = 0, incarnation: int = 0
) -> dict[str, Any]:
    """Returns a contribution as a merge names it."""
    who = {"learner": learner, "incarnation": incarnation, "round": round}
    return {**who, "base": base, "coefficient": 1.0}


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.tobytes() == b.tobytes() and a.dtype == b.dtype for a, b in pairs)
