"""Tests that updates on blocks equal the trainer's own step on whole trees."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from meshloom.service.blocks.layout import Box, Leaf, make_layout
from meshloom.service.blocks.pieces import pieces
from meshloom.service.server.store import BlockStore
from meshloom.service.server.update import OptaxUpdate, OuterUpdate
from meshloom.trainer.program import step
from meshloom.trainer.program.optimizers import Adafactor, AdamW, Lion, Muon
from meshloom.trainer.program.state import State

SIZES = dict(vocab=24, embed=32, layer=4, heads=4, head_dim=8, norm=32, ff=48)
# Not in alphabetical order, in which jax returns dictionaries.
AXES = {
    "norm": ("layer", "norm"),
    "qkv_bias": ("layer", "heads", "head_dim"),
    "out": ("layer", "heads", "head_dim", "embed"),
    "query": ("layer", "embed", "heads", "head_dim"),
    "up": ("layer", "embed", "ff"),
    "table": ("vocab", "embed"),
    "scale": (),
}
RATE = optax.linear_schedule(3e-2, 0.0, 10)
# Lion and Adafactor are equal to the last bit here. AdamW and Muon differ by up to
# 1.5e-7 of the largest element: what the compiler fuses depends on a program's shapes.
RTOL = 1e-6


def tree(seed, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {name: [SIZES[a] for a in axes] for name, axes in AXES.items()}
    draw = {name: rng.normal(size=s, scale=scale) for name, s in shapes.items()}
    return {name: np.asarray(x, dtype) for name, x in draw.items()}


def leaves_of(params):
    return [Leaf(n, x.shape, x.dtype.name, AXES[n]) for n, x in params.items()]


def optimizer_spec(layout, policy=None):
    update = {"kind": "optimizer"}
    policy = {"outer": None, "compensation": 0.0, **(policy or {})}
    return {"job": "j", "policy": policy, "layout": layout.to_json(), "update": update}


def outer_spec(layout, **outer):
    spec = optimizer_spec(layout, {"outer": outer})
    return {**spec, "update": {"kind": "outer"}}


def push(stores, learner, round, arrays, fragment=None):
    """Sends a tree in pieces: halves of every leaf, as two devices would."""
    layout = stores[0].layout
    for i, leaf in enumerate(layout.leaves):
        for half in halves(leaf.shape):
            for block, slab, box in pieces(layout, i, half):
                if fragment in (None, layout.fragment_of(block)):
                    store = next(s for s in stores if block in s.owned)
                    array = arrays[leaf.path][box.slices()]
                    store.stage(learner, 0, round, block, slab, box.start, array)


def halves(shape):
    whole = Box.whole(shape)
    if not shape or shape[-1] < 2:
        return [whole]
    middle = (*shape[:-1], shape[-1] // 2)
    return [Box(whole.start, middle), Box((*whole.start[:-1], middle[-1]), shape)]


def commit(stores, version, payloads, weights, *, max_norm=None, share=1.0, **facts):
    """Sends contributions of all learners and commits them; returns the norm."""
    contributions = []
    for learner, (payload, weight) in enumerate(zip(payloads, weights, strict=True)):
        push(stores, learner, version, payload)
        contributions.append(
            {"learner": learner, "incarnation": 0, "round": version}
            | {"base": version - 1, "coefficient": 1.0, "weight": weight, **facts}
        )
    merged = [s.merge(version, 0, contributions, sum(weights)) for s in stores]
    total = math.fsum(part["sum_of_squares"] for part in merged)
    norm, scale = np.float32(math.sqrt(total)), 1.0
    if max_norm is not None:
        scale = float(min(np.float32(1), np.float32(max_norm) / norm))
    drop = [[learner, 0, version] for learner in range(len(payloads))]
    for store in stores:
        store.apply(version, scale, version - 1, share, [], drop)
    return norm


def read(stores, version):
    layout = stores[0].layout
    found = {leaf.path: np.empty(leaf.shape, leaf.dtype) for leaf in layout.leaves}
    for block in layout.blocks:
        store = next(s for s in stores if block.index in s.owned)
        for slab in block.slabs:
            part = store.read(version, slab.leaf, slab.box)
            found[layout.leaves[slab.leaf].path][slab.box.slices()] = part
    return found


def optimizer_update(optimizer):
    return lambda spec: OptaxUpdate(optimizer.make, RATE)


def sgd(learning_rate):
    return lambda spec: OptaxUpdate(
        lambda rate, axes: optax.sgd(rate), lambda step: learning_rate
    )


def two_servers(layout, optimizer):
    num = len(layout.blocks)
    spec, make = optimizer_spec(layout), optimizer_update(optimizer)
    owned = [range(0, num, 2), range(1, num, 2)]
    return [BlockStore(spec, part, make_update=make) for part in owned]


class NoVariables:
    def loss(self, params, batch, shard):
        raise NotImplementedError


def trainer_steps(params, payloads, weights, optimizer, max_norms):
    """Runs the trainer's own `apply` on whole trees; yields parameters and norm."""

    def make_tx(rate):
        return optimizer.make(rate, AXES)

    @functools.partial(jax.jit, static_argnums=3)
    def one(state, grads, weight, max_norm):
        sums = {"loss": jnp.float32(0), "weight": weight}
        found = step.Gradients(sums, grads, {}, {})
        return step.apply(
            state,
            found,
            model=NoVariables(),  # type: ignore
            make_tx=make_tx,
            learning_rate=RATE,
            max_grad_norm=max_norm,
        )

    state = State(jnp.int32(0), params, make_tx(RATE).init(params))
    for trees, max_norm in zip(payloads, max_norms, strict=True):
        grads = trees[0]
        for other in trees[1:]:
            grads = jax.tree.map(np.add, grads, other)
        state, metrics = one(state, grads, np.float32(sum(weights)), max_norm)
        yield state.params, metrics["grad_norm"]


CASES = [
    (AdamW(), "element"),
    (Lion(), "element"),
    (Muon(), "matrix"),
    (Adafactor(min_dim_size_to_factor=8), "leaf"),
]


@pytest.mark.parametrize(
    ("optimizer", "granularity"), CASES, ids=lambda x: getattr(x, "lower", type(x))()
)
def test_blocks_equal_whole_trees(optimizer, granularity):
    """Without clipping, and then with it."""
    params = tree(0)
    layout = make_layout(leaves_of(params), granularity=granularity, block_bytes=8000)
    assert len(layout.blocks) > 3
    stores = two_servers(layout, optimizer)
    push(stores, 0, 0, params)
    weights = [64.0, 96.0, 32.0]
    payloads = [
        [tree(10 * n + i, scale=w) for i, w in enumerate(weights)] for n in range(4)
    ]
    max_norms = [None, None, 0.5, 0.5]
    expected = trainer_steps(params, payloads, weights, optimizer, max_norms)
    for version, (trees, (whole, norm)) in enumerate(
        zip(payloads, expected, strict=True), start=1
    ):
        limit = max_norms[version - 1]
        found = commit(stores, version, trees, weights, max_norm=limit)
        assert limit is None or found > limit
        assert found == pytest.approx(float(norm), rel=1e-6)
        now = read(stores, version)
        for path in AXES:
            size = np.abs(whole[path]).max()
            error = np.abs(now[path] - whole[path]).max()
            assert error <= RTOL * size, (version, path, error / size)


def test_outer_nesterov_by_hand():
    """m <- .9 m + d; theta -= .7 (d + .9 m), with d the weighted mean change."""
    params = tree(0)
    layout = make_layout(leaves_of(params), block_bytes=8000)
    spec = outer_spec(layout, learning_rate=0.7, momentum=0.9, nesterov=True)
    stores = [BlockStore(spec)]
    push(stores, 0, 0, params)
    momentum = {path: np.zeros(x.shape) for path, x in params.items()}
    expected = {path: x.astype(np.float64) for path, x in params.items()}
    for version in (1, 2, 3):
        changes = [tree(10 * version + i, scale=0.01) for i in range(2)]
        contributions = []
        for learner, tokens in enumerate([300.0, 100.0]):
            push(stores, learner, version, changes[learner])
            contributions.append(
                {"learner": learner, "incarnation": 0, "round": version}
                | {"base": version - 1, "coefficient": tokens}
            )
        stores[0].merge(version, 0, contributions, 400.0)
        stores[0].apply(version, 1.0, version - 1, 1.0)
        for path in AXES:
            mean = 0.75 * changes[0][path] + 0.25 * changes[1][path]
            momentum[path] = 0.9 * momentum[path] + mean
            expected[path] -= 0.7 * (mean + 0.9 * momentum[path])
        for path, found in read(stores, version).items():
            np.testing.assert_allclose(found, expected[path], rtol=0, atol=2e-6)


def test_outer_momentum_of_bfloat16_parameters_is_float32():
    params = {"w": jnp.ones((4,), jnp.bfloat16)}
    update = OuterUpdate(1.0, momentum=0.5)
    state = update.init(params, {"w": (None,)})
    assert [x.dtype for x in jax.tree.leaves(state)] == [jnp.float32]
    grads = {"w": jnp.full((4,), 2**-9, jnp.float32)}
    new, state = update.update(grads, state, params, {}, 0, 1.0)
    assert new["w"].dtype == jnp.bfloat16
    assert jax.tree.leaves(state)[0].tolist() == [2**-9] * 4


@pytest.mark.parametrize("nesterov", [False, True])
def test_shares_of_an_update_leave_the_momentum_of_one(nesterov):
    """Four learners that are committed one by one are as one commit of all four."""
    update = OuterUpdate(0.7, momentum=0.9, nesterov=nesterov)
    change, still = {"w": np.ones(2, np.float32)}, {"w": np.zeros(2, np.float32)}
    found = []
    for share in (1.0, 0.25):
        params, times = still, round(1 / share)
        state = update.init(params, {"w": (None,)})
        for _ in range(times):
            params, state = update.update(change, state, params, {}, 0, share)
        momentum = jax.tree.leaves(state)[0]
        for _ in range(150 * times):  # until the momentum is gone
            params, state = update.update(still, state, params, {}, 0, share)
        found.append((momentum, params["w"]))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    # .7 of the change, and of it again .9, .81, ...
    np.testing.assert_allclose(found[0][1], -7.0, rtol=1e-5)
    np.testing.assert_allclose(found[1][1], -7.0, rtol=1e-4)


def test_share_scales_the_learning_rate():
    """Two commits of half a share move as far as one, if the gradient is the same."""
    params = {"w": np.ones((4, 6), np.float32)}
    layout = make_layout([Leaf("w", (4, 6), "float32", (None, None))])
    grads = {"w": tree(1)["up"][0, :4, :6]}
    found = []
    for share in (1.0, 0.5):
        stores = [BlockStore(optimizer_spec(layout), make_update=sgd(0.5))]
        push(stores, 0, 0, params)
        commit(stores, 1, [grads], [1.0], share=share)
        found.append(params["w"] - read(stores, 1)["w"])
    np.testing.assert_allclose(found[0], 0.5 * grads["w"], atol=1e-6)
    np.testing.assert_allclose(found[1], 0.5 * found[0], atol=1e-6)


def test_the_step_of_a_commit_is_the_index_of_the_schedule():
    params, layout = tree(0), make_layout(leaves_of(tree(0)))
    make = optimizer_update(Lion(weight_decay=0.0))
    stores = [BlockStore(optimizer_spec(layout), make_update=make)]
    push(stores, 0, 0, params)
    facts = {"learner": 0, "incarnation": 0, "base": 0, "coefficient": 1.0}
    for version, at in ((1, 0), (2, 7)):
        push(stores, 0, version, tree(5))
        stores[0].merge(version, 0, [{**facts, "round": version}], 1.0)
        before = read(stores, version - 1)["up"]
        stores[0].apply(version, 1.0, at, 1.0, keep=[0, 1])
        moved = np.abs(read(stores, version)["up"] - before)
        np.testing.assert_allclose(moved, float(RATE(at)), rtol=1e-3)


def test_compensation_by_hand():
    """g + lambda * g * g * (w - w_base), for the mean gradient of a contribution."""
    params = {"w": np.float32([1.0, 2.0, 3.0, 4.0])}
    layout = make_layout([Leaf("w", (4,), "float32", (None,))])
    spec = optimizer_spec(layout, {"compensation": 2.0})
    store = BlockStore(spec, make_update=sgd(1.0))
    push([store], 0, 0, params)
    facts = {"incarnation": 0, "round": 1, "base": 0, "coefficient": 1.0}
    for learner in (0, 1):  # both start from version 0, one after the other
        push([store], learner, 1, {"w": np.float32([4, 8, 12, 16])})
        row = {**facts, "learner": learner, "weight": 4.0}
        store.merge(learner + 1, 0, [row], 4.0)
        store.apply(learner + 1, 1.0, 0, 1.0, keep=[0, 1])
    g = np.float32([1, 2, 3, 4])
    first = params["w"] - g
    second = first - (g + 2.0 * g * g * (first - params["w"]))
    assert read([store], 1)["w"].tolist() == first.tolist()
    assert read([store], 2)["w"].tolist() == second.tolist()


def test_gradients_are_added_in_order_of_learner():
    """In float32 (1e8 + 1) - 1e8 is 0, while (1e8 - 1e8) + 1 is 1."""
    layout = make_layout([Leaf("w", (1,), "float32", (None,))])
    store = BlockStore(outer_spec(layout, learning_rate=1.0))
    push([store], 0, 0, {"w": np.zeros(1, np.float32)})
    payloads = [1e8, 1.0, -1e8]
    facts = {"incarnation": 0, "round": 1, "base": 0, "coefficient": 1.0}
    for learner in (2, 0, 1):
        push([store], learner, 1, {"w": np.float32([payloads[learner]])})
    rows = [{**facts, "learner": learner} for learner in (0, 2, 1)]
    assert store.merge(1, 0, rows, 1.0)["sum_of_squares"] == 0.0


def test_bfloat16_payloads_are_added_in_float32():
    layout = make_layout([Leaf("w", (1,), "float32", (None,))])
    store = BlockStore(outer_spec(layout, learning_rate=1.0))
    push([store], 0, 0, {"w": np.zeros(1, np.float32)})
    facts = {"incarnation": 0, "round": 1, "base": 0, "coefficient": 1.0}
    for learner, value in enumerate([256.0, 1.0]):  # 257 has 9 bits
        push([store], learner, 1, {"w": np.array([value], ml_dtypes.bfloat16)})
    rows = [{**facts, "learner": learner} for learner in (0, 1)]
    assert store.merge(1, 0, rows, 1.0)["sum_of_squares"] == 257.0**2


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_reported(value):
    layout = make_layout([Leaf("w", (2,), "float32", (None,))])
    store = BlockStore(outer_spec(layout, learning_rate=1.0))
    push([store], 0, 0, {"w": np.zeros(2, np.float32)})
    push([store], 0, 1, {"w": np.float32([1.0, value])})
    row = {"learner": 0, "incarnation": 0, "round": 1, "base": 0, "coefficient": 1.0}
    assert store.merge(1, 0, [row], 1.0)["finite"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"update": {"kind": "magic"}}, "unknown kind of update 'magic'"),
        ({"update": {"kind": "outer"}}, "its policy has no outer optimizer"),
        ({}, "this server has no optimizers of a trainer"),
    ],
)
def test_an_update_that_is_not_known_is_refused(change, message):
    layout = make_layout([Leaf("w", (2,), "float32", (None,))])
    with pytest.raises(ValueError, match=message):
        BlockStore({**optimizer_spec(layout), **change})
