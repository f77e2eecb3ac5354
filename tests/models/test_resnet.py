"""The residual network: its arithmetic, its batch norms and what it drops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.models import resnet
from meshloom.models.classifier import ImageClassifier
from meshloom.sharding import Sharder

SMALL = resnet.Config(num_classes=3, size=4, channels=2, widths=(4, 6), momentum=0.8)
DRAW = np.random.default_rng(0)
BATCH = {
    "image": (3 + DRAW.normal(size=(5, 4, 4, 2))).astype(np.float32),
    "label": np.array([0, 2, 1, 1, 0], np.int32),
    "weights": np.array([1, 1, 1, 1, 0], np.float32),  # the last one is padding
}


def made(config=SMALL):
    """Returns random parameters, and variances that are positive."""
    draw = np.random.default_rng(1)
    params = jax.eval_shape(lambda: config.init(jax.random.key(0)))
    variables = jax.eval_shape(lambda: config.init_variables(jax.random.key(0)))
    params = jax.tree.map(lambda x: 0.5 * draw.normal(size=x.shape), params)
    variables = jax.tree.map(lambda x: draw.uniform(0.5, 1.5, x.shape), variables)
    return jax.tree.map(np.float32, (params, variables))


def loss(params, variables, *, train, config=SMALL, batch=BATCH):
    keys = jax.random.split(jax.random.key(5), len(batch["label"]))
    return config.loss(
        params, batch, Sharder(), variables=variables, key=keys, train=train
    )


class Expected:
    """The network in float64, one pixel at a time; keeps each norm's statistics."""

    def __init__(self, params, variables, train):
        self.p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.v, self.train, self.statistics = variables, train, {}

    def convolved(self, x, w, stride):
        size, pixels = w.shape[0], x.shape[1] // stride
        # SAME: the padding that the window needs, the larger half at the end.
        total = max((pixels - 1) * stride + size - x.shape[1], 0)
        before = total // 2
        pad = (before, total - before)
        x = np.pad(x, ((0, 0), pad, pad, (0, 0)))
        y = np.zeros((len(x), pixels, pixels, w.shape[-1]))
        for i in range(pixels):
            for j in range(pixels):
                rows, columns = i * stride, j * stride
                window = x[:, rows : rows + size, columns : columns + size]
                y[:, i, j] = np.einsum("bhwc,hwco->bo", window, w)
        return y

    def normed(self, x, *path):
        p, v = self.p, self.v
        for name in path:
            p, v = p[name], v[name]
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        self.statistics["/".join(path)] = mean, variance
        if not self.train:
            mean, variance = v["mean"], v["variance"]
        return (x - mean) / np.sqrt(variance + 1e-5) * p["scale"] + p["bias"]

    def block(self, x, name, stride):
        p = self.p[name]
        y = self.convolved(x, p["conv_1"], stride)
        y = np.maximum(self.normed(y, name, "norm_1"), 0)
        y = self.normed(self.convolved(y, p["conv_2"], 1), name, "norm_2")
        if "shortcut" in p:
            x = self.convolved(x, p["shortcut"], stride)
            x = self.normed(x, name, "shortcut_norm")
        return np.maximum(x + y, 0)

    def logits(self, images):
        x = self.convolved(images.astype(np.float64), self.p["stem"], 1)
        x = np.maximum(self.normed(x, "stem_norm"), 0)
        x = self.block(self.block(x, "block_0", 1), "block_1", 2)
        return x.mean((1, 2)) @ self.p["head"] + self.p["head_bias"]


@pytest.mark.parametrize("train", [True, False])
def test_the_loss_is_that_of_the_equations(train):
    params, variables = made()
    found, weight, others, _ = loss(params, variables, train=train)
    logits = Expected(params, variables, train).logits(BATCH["image"])
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    right = BATCH["label"][:4]
    assert float(found) == pytest.approx(-scores[np.arange(4), right].sum(), rel=1e-4)
    assert weight == 4 and set(others) == {"accuracy"}
    assert others["accuracy"] == (logits.argmax(-1)[:4] == right).sum()
    if not train:
        shown = SMALL.logits(params, BATCH["image"], Sharder(), variables=variables)
        np.testing.assert_allclose(shown, logits, rtol=1e-4, atol=1e-4)


def test_running_averages_follow_the_batch():
    params, variables = made()
    *_, sums = loss(params, variables, train=True)
    found = SMALL.update_variables(variables, sums)
    expected = Expected(params, variables, train=True)
    expected.logits(BATCH["image"])
    paths = {f"{path}/{name}" for path in expected.statistics for name in "mv"}
    assert len(paths) == len(jax.tree.leaves(found)) == 12
    for path, statistics in expected.statistics.items():
        old, new = variables, found
        for name in path.split("/"):
            old, new = old[name], new[name]
        for name, value in zip(("mean", "variance"), statistics, strict=True):
            value = 0.8 * old[name] + 0.2 * value
            np.testing.assert_allclose(new[name], value, rtol=1e-4, err_msg=path)


def test_the_variance_of_values_far_from_0_is_kept():
    """In float32, E[x^2] - E[x]^2 of these would be 0 or worse."""
    from flax import nnx

    from meshloom.models.batch_norm import BatchNorm, update

    x = (3000 + DRAW.normal(size=(64, 4, 4, 2))).astype(np.float32)
    norm = BatchNorm(2, "mlp")
    norm.mean = nnx.BatchStat(jnp.full(2, 2999.0), axes=("mlp",))
    y, sums = norm(jnp.asarray(x), Sharder(), train=True)
    np.testing.assert_allclose(np.std(y, axis=(0, 1, 2)), 1, rtol=1e-3)
    old = {"mean": jnp.full(2, 2999.0), "variance": jnp.ones(2)}
    new = update(old, sums, 0.0)
    np.testing.assert_allclose(new["variance"], x.var((0, 1, 2)), rtol=1e-3)


def test_dropout_and_smoothing_are_of_training_alone():
    changed = dataclasses.replace(SMALL, dropout=0.5, label_smoothing=0.2)
    params, variables = made()
    plain = loss(params, variables, train=True)
    dropped = loss(
        params, variables, train=True, config=dataclasses.replace(SMALL, dropout=0.5)
    )
    assert abs(dropped[0] - plain[0]) > 0.1
    exact, *_ = loss(params, variables, train=False)
    total, _, others, _ = loss(params, variables, train=False, config=changed)
    assert float(total - others["penalty"]) == pytest.approx(float(exact), rel=1e-6)


def test_smoothing_is_the_cross_entropy_with_smoothed_labels():
    logits = DRAW.normal(size=(5, 3)).astype(np.float32)
    smooth = ImageClassifier(num_classes=3, size=4, label_smoothing=0.3)
    found, _, others = smooth.sums(jnp.asarray(logits), BATCH)
    labels = 0.7 * np.eye(3)[BATCH["label"]] + 0.1
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert float(found) == pytest.approx(-(labels * log_p)[:4].sum(), rel=1e-6)
    exact = -(np.eye(3)[BATCH["label"]] * log_p)[:4].sum()
    assert float(others["penalty"]) == pytest.approx(float(found) - exact, rel=1e-4)


def test_parameters_and_flops_are_counted():
    norms = 2 * (4 + 4 + 4 + 6 + 6 + 6)
    products = {"stem": 9 * 2 * 4, "first": 9 * 2 * 4 * 4, "head": 6 * 3}
    second = 9 * (4 * 6 + 6 * 6) + 4 * 6
    assert SMALL.num_params() == sum(products.values()) + second + norms + 3
    assert SMALL.model_flops({"label": np.zeros(7)}) == 6 * 7 * (
        16 * (products["stem"] + products["first"]) + 4 * second + products["head"]
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"widths": ()}, "widths must have at least one number"),
        ({"widths": (4, 0)}, r"widths\[1\] must be >= 1, got 0"),
        ({"size": 6, "widths": (4, 4, 4)}, "size must be a multiple of 4, by which 3"),
        ({"num_blocks": 0}, "num_blocks must be >= 1"),
        ({"dropout": 1.0}, "dropout must be >= 0 and < 1, got 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing must be >= 0 and < 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
