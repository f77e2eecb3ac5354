"""Sums of contributions: the same bits wherever they are added."""

import numpy as np
import pytest

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.server.receiving import Receiving
from meshloom.service.server.store import BlockStore
from meshloom.service.server.summing import stage_sums, summed
from meshloom.service.wire import tensors
from meshloom.service.wire.errors import Refused
from meshloom.service.wire.sums import FIRST, staged_parts, tree_of

LEAVES = [Leaf("w", (64, 40), "float32", (None, None)), Leaf("b", (), "float32", ())]
LAYOUT = make_layout(LEAVES, block_bytes=2048)
BLOCKS = range(len(LAYOUT.blocks))
SPEC = {
    "job": "j",
    "policy": {"outer": {"learning_rate": 1.0}},
    "layout": LAYOUT.to_json(),
    "update": {"kind": "outer"},
    "compression": {"push": "int8"},
}
COEFFICIENTS = {(i, 1, 1): 0.1 * (i + 1) for i in range(5)}


@pytest.fixture
def store():
    """With the parameters, and contributions of five learners to round 1."""
    made = BlockStore(SPEC)
    stage(made, (0, 0, 0), 100)
    for key in COEFFICIENTS:
        stage(made, key, key[0])
    return made


def stage(store, key, seed: int) -> None:
    for block in LAYOUT.blocks:
        for i, slab in enumerate(block.slabs):
            random = np.random.default_rng([seed, block.index, i])
            array = random.normal(size=slab.box.shape).astype(np.float32)
            store.stage(*key, block.index, i, slab.box.start, array)


def parts():
    names = ("learner", "incarnation", "round")
    about = {"base": 0, "weight": 1.0}
    return [
        {**dict(zip(names, key, strict=True)), **about, "coefficient": c}
        for key, c in COEFFICIENTS.items()
    ]


def norm_of(store, trees) -> float:
    stage_sums(store.staging, LAYOUT, BLOCKS, trees, COEFFICIENTS)
    return store.merge(1, 0, staged_parts(parts(), trees), 1.5)["sum_of_squares"]


def test_sums_of_sums_are_the_sum_of_all(store):
    inner = tree_of((FIRST + 1, 1, 1), [(2, 1, 1), (1, 1, 1)])
    outer = tree_of((FIRST + 0, 1, 1), [inner, (0, 1, 1)])
    flat, one, two = (norm_of(store, trees) for trees in ([], [inner], [outer]))
    assert flat == pytest.approx(one, rel=1e-6) and flat == pytest.approx(two, rel=1e-6)
    assert len({flat, one, two}) > 1  # in another order, so these are other bits
    assert two == norm_of(store, [outer])


def test_what_a_merger_sends_is_what_a_replay_adds_up(store):
    keys = [(1, 1, 1), (3, 1, 1)]
    tree, at = tree_of((FIRST + 1, 5, 1), keys), BlockStore(SPEC)
    stage(at, (0, 0, 0), 100)
    sent = [
        ({"block": block, "slab": slab}, start, array)
        for block, slab, start, array in summed(
            store.staging, LAYOUT, BLOCKS, {key: COEFFICIENTS[key] for key in keys}
        )
    ]
    receiving = Receiving(at, (FIRST + 1, 5, 1))  # sums are not packed, others are
    messages = tensors.encode(sent)
    tensors.decode(messages, ("block", "slab"), receiving.target, receiving.done)
    stage_sums(store.staging, LAYOUT, BLOCKS, [tree], COEFFICIENTS)
    for block in BLOCKS:
        ours, theirs = (
            s.staging.complete((FIRST + 1, 5, 1), BLOCKS).arrays(block)
            for s in (store, at)
        )
        for a, b in zip(ours, theirs, strict=True):
            assert a.tobytes() == b.tobytes()
    with pytest.raises(Refused, match="packed as float32, in this job it must be int8"):
        receiving = Receiving(at, (1, 1, 1))
        messages = tensors.encode(sent)
        tensors.decode(messages, ("block", "slab"), receiving.target, receiving.done)


def test_what_has_not_arrived_is_refused_before_anything_is_sent(store):
    with pytest.raises(Refused, match=r"learner 9 \(incarnation 1\), round 1: nothing"):
        summed(store.staging, LAYOUT, BLOCKS, {(9, 1, 1): 1.0})


def test_a_sum_that_the_commit_has_only_in_part_is_an_error():
    tree = tree_of((FIRST, 1, 1), [(0, 1, 1), (9, 1, 1)])
    with pytest.raises(ValueError, match=r"\[9, 1, 1\] is part of a sum, but not of"):
        staged_parts(parts(), [tree])
