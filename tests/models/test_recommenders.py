"""Two towers and DLRM: their arithmetic, and that they beat popularity."""

import dataclasses
import functools
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import ROOT

from meshloom.models import dlrm, nnx_pure, two_towers
from meshloom.sharding import MeshSpec, Rules, Sharder, parse_plan
from meshloom.trainer.program.build import build
from meshloom.trainer.program.optimizers import RowAdaGrad

DRAW = np.random.default_rng(0)
CLICKS = dlrm.Config(
    num_dense=2, table_rows=(5, 3), width=4, bottom=(6,), top=(7,), pad_rows_to=4
)
CHOICES = two_towers.Config(
    num_users=6,
    num_items=5,
    width=3,
    num_situation=2,
    hidden=(4,),
    recall_at=2,
    pad_rows_to=4,
)


def made(model):
    draw = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return jax.tree.map(lambda x: np.float32(0.7 * draw.normal(size=x.shape)), shapes)


def layers(p, x):
    """Two dense layers with a ReLU between them, in float64."""
    x = np.maximum(x @ p["layer_0"] + p["layer_0_bias"], 0)
    return x @ p["layer_1"] + p["layer_1_bias"]


def test_the_loss_of_dlrm_is_that_of_the_equations():
    params = made(CLICKS)
    batch = {
        "dense": DRAW.normal(size=(4, 2)).astype(np.float32),
        "ids": np.array([[4, 0], [1, 2], [4, 2], [0, 0]], np.int32),
        "label": np.array([1, 0, 1, 0], np.int32),
        "weights": np.array([1, 1, 1, 0], np.float32),  # the last one is padding
    }
    logits = []
    for dense, (i, j) in zip(batch["dense"], batch["ids"], strict=True):
        x = layers(params["bottom"], dense.astype(np.float64))
        a, b = (params[f"table_{t}"]["embedding"][n] for t, n in ((0, i), (1, j)))
        logits.append(layers(params["top"], np.array([*x, x @ a, x @ b, a @ b]))[0])
    probability = 1 / (1 + np.exp(-np.array(logits)))
    right = np.where(batch["label"] == 1, probability, 1 - probability)[:3]
    total, weight, others = CLICKS.loss(params, batch, Sharder())
    assert total == pytest.approx(-np.log(right).sum(), rel=1e-4) and weight == 3
    assert others["accuracy"] == (right > 0.5).sum()
    found = CLICKS.predict(params, batch, Sharder())["probability"]
    np.testing.assert_allclose(found, probability, rtol=1e-4)


def scores(params):
    """Returns [B, items]: the scores of all items for the batch, in float64."""
    rows = params["users"]["embedding"][BATCH["user"]]
    users = layers(params["user_tower"], np.hstack([rows, BATCH["situation"]]) + 0.0)
    items = layers(params["item_tower"], params["items"]["embedding"][:5] + 0.0)
    return users.astype(np.float64) @ items.T.astype(np.float64)


BATCH = {
    "user": np.array([3, 5, 0, 3], np.int32),
    "situation": DRAW.normal(size=(4, 2)).astype(np.float32),
    "item": np.array([1, 4, 1, 2], np.int32),
    "log_share": np.log([0.4, 0.1, 0.4, 0.2]).astype(np.float32),
    "weights": np.array([1, 1, 1, 0], np.float32),  # the last one is padding
}


def test_candidates_of_the_batch_leave_out_the_same_item_and_padding():
    params = made(CHOICES)
    corrected = scores(params)[:, BATCH["item"]] - BATCH["log_share"]
    expected = 0.0
    for row, candidates in ((0, [0, 1]), (1, [0, 1, 2]), (2, [1, 2])):
        among = corrected[row, candidates]
        expected += np.log(np.exp(among).sum()) - corrected[row, row]
    total, weight, others = CHOICES.loss(params, BATCH, Sharder(), train=True)
    assert total == pytest.approx(expected, rel=1e-4)
    assert weight == 3 and not others


@pytest.mark.parametrize("train", [True, False])
def test_all_items_are_candidates(train):
    model, params = dataclasses.replace(CHOICES, candidates="all"), made(CHOICES)
    found = scores(params)[:3]
    own = found[np.arange(3), BATCH["item"][:3]]
    total, weight, others = model.loss(params, BATCH, Sharder(), train=train)
    expected = (np.log(np.exp(found).sum(1)) - own).sum()
    assert total == pytest.approx(expected, rel=1e-4) and weight == 3
    ranks = (found > own[:, None]).sum(1)
    assert others == {"recall_at_2": (ranks < 2).sum()}


def test_the_best_items_are_found_in_a_sharded_table():
    params = made(CHOICES)
    expected = np.argsort(-scores(params), axis=1)[:, :2]
    mesh = MeshSpec(data=2, tensor=2).make(jax.devices()[:4])
    rules = parse_plan("data+fsdp+tensor") + Rules.of({"rows": ("data", "tensor")})
    for shard in (Sharder(), Sharder(mesh, rules)):
        predict = functools.partial(CHOICES.predict, shard=shard)
        found = jax.jit(predict)(
            params, {"user": BATCH["user"], "situation": BATCH["situation"]}
        )
        np.testing.assert_array_equal(found["items"], expected)


def test_an_unknown_item_is_not_trained_on():
    params = made(CHOICES)
    batch = BATCH | {"item": np.array([1, 5, 1, 2], np.int32)}  # 5 is padding
    for mode in (True, False):
        assert np.isnan(CHOICES.loss(params, batch, Sharder(), train=mode)[0])


@pytest.mark.parametrize("name", ["two_towers", "dlrm"])
def test_the_best_of_a_short_training_beats_popularity(name):
    """docs/recommenders.md has the margin of the shipped configs, with three seeds."""
    path = ROOT / "benchmarks" / "recommenders.py"
    benchmark = runpy.run_path(str(path))
    config = benchmark["load"](name)
    sizes = {"num_users": 100, "num_items": 64}
    rows = {"table_rows": (100, 64, 24)} if name == "dlrm" else sizes
    short = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **rows),
        data=dataclasses.replace(
            config.data, num_examples=20_480, num_eval_examples=2048, **sizes
        ),
        schedule=dataclasses.replace(config.schedule, peak=0.02),
        batch_size=512,
        num_steps=150,
    )
    found = benchmark["score"](short)
    assert found.popularity + 0.1 < found.model < found.best + 0.02


def test_only_rows_that_are_used_change():
    """Neither other rows nor their accumulators, bit for bit, on a mesh."""
    mesh = MeshSpec(data=2, tensor=4).make()
    rules = parse_plan("data+fsdp+tensor") + Rules.of({"rows": ("data", "tensor")})
    model = dataclasses.replace(CHOICES, pad_rows_to=8, num_users=16)
    program = build(model, RowAdaGrad(), mesh, rules, BATCH, donate=False)
    before = program.init(jax.random.key(0))
    middle, _ = program.step(before, BATCH)
    # The same rows have a momentum now; the next batch has other users.
    others = BATCH | {"user": np.array([9, 10, 11, 12], np.int32)}
    after, _ = program.step(middle, others)

    def changed(old, new):
        found = [np.asarray(x["users"]["embedding"]) for x in (old.params, new.params)]
        return np.flatnonzero((found[0] != found[1]).any(axis=1)).tolist()

    assert changed(before, middle) == [0, 3, 5]
    assert changed(middle, after) == [9, 10, 11]  # 12 has a weight of 0
    accumulators = [
        np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(after.opt_state)
        if jax.tree_util.keystr(path).endswith("squares['users']['embedding']")
    ]
    assert len(accumulators) == 1
    assert np.flatnonzero(accumulators[0]).tolist() == [0, 3, 5, 9, 10, 11]


@pytest.mark.parametrize(
    "model, changes, message",
    [
        (CLICKS, {"table_rows": ()}, "table_rows must have at least one number"),
        (CLICKS, {"table_rows": (3, 0)}, r"table_rows\[1\] must be >= 1, got 0"),
        (CLICKS, {"pad_rows_to": 0}, "pad_rows_to must be >= 1"),
        (CLICKS, {"top": (0,)}, r"top\[0\] must be >= 1"),
        (CHOICES, {"candidates": "some"}, "candidates must be 'batch' or 'all'"),
        (CHOICES, {"recall_at": 6}, "recall_at is 6, more than num_items 5"),
    ],
)
def test_settings_that_cannot_work_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(model, **changes)


@pytest.mark.parametrize(
    "model, changes, facts, message",
    [
        (CHOICES, {"item": None}, {}, "needs an array 'item'"),
        (CHOICES, {"situation": None}, {}, r"'situation' has shape \(0,\)"),
        (CHOICES, {}, {"num_items": 7}, "Raise num_items to 7"),
        (CLICKS, {"label": None}, {}, "needs an array 'label'"),
        (CLICKS, {"ids": (4, 3)}, {}, r"'ids' has shape \(3,\).*expects \(2,\)"),
        (CLICKS, {}, {"table_rows": (5, 4)}, "Raise them to those of the data"),
    ],
)
def test_data_that_does_not_fit_is_refused(model, changes, facts, message):
    shapes = {"user": (4,), "item": (4,), "situation": (4, 2)}
    if model is CLICKS:
        shapes = {"dense": (4, 2), "ids": (4, 2), "label": (4,)}
    shapes |= changes
    batch = {k: jnp.zeros(shape) for k, shape in shapes.items() if shape is not None}
    with pytest.raises(ValueError, match=message):
        model.check_batch(batch, facts)


def test_parameters_and_flops_are_counted():
    tower = 3 * 4 + 4 + 4 * 3 + 3
    assert CHOICES.num_params() == (8 + 8) * 3 + 2 * tower + 2 * 4
    flops = 6 * (7 * 32 + 7 * 24 + 49 * 3)
    assert CHOICES.model_flops({"user": np.zeros(7)}) == flops
    layers_of = 2 * 6 + 6 * 4 + 7 * 7 + 7
    assert CLICKS.num_params() == (8 + 4) * 4 + layers_of + 6 + 4 + 7 + 1
    assert CLICKS.model_flops({"ids": np.zeros((5, 2))}) == 30 * (layers_of + 12)
    assert nnx_pure.axes(CLICKS.make)["table_0"] == {"embedding": ("rows", None)}
