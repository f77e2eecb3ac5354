"""The image classifier: its arithmetic, and the same training on every mesh."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import short_runs

from meshloom.models import convnet
from meshloom.sharding import MeshSpec, Sharder, parse_plan
from meshloom.trainer.config import files as config_files
from meshloom.trainer.run import train

SMALL = convnet.Config(num_classes=3, size=4, channels=2, widths=(4, 6), d_hidden=5)
NUM_STEPS = 12

# name: (mesh, plan, how many ways the arrays of the two large weights are sharded)
LAYOUTS = {
    "data": ("data=8", "data", {"conv2": 1, "dense": 1}),
    "fsdp": ("fsdp=8", "data+fsdp", {"conv1": 8, "conv2": 8, "dense": 8, "head": 8}),
    "zero1": ("data=2,fsdp=4", "data+zero1", {"conv2": 1, "dense": 1}),
    "tensor": ("data=2,tensor=4", "data+tensor", {"conv2": 4, "dense": 4, "head": 1}),
    "all": (
        "data=2,fsdp=2,tensor=2",
        "auto",
        {"conv1": 2, "conv2": 4, "conv2_bias": 2, "dense": 4, "head": 2},
    ),
    "tensor2d": ("fsdp=2,tensor=4", "data+tensor2d", {"conv2": 8, "dense": 8}),
}


def expected_logits(params, images):
    """Returns the logits in float64, one pixel of one image at a time."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}

    def convolved(x, name):
        side = x.shape[0]
        padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
        y = np.zeros((side, side, p[name].shape[-1]))
        for i in range(side):
            for j in range(side):
                window = padded[i : i + 3, j : j + 3]
                y[i, j] = np.einsum("hwc,hwco->o", window, p[name])
        return np.maximum(y + p[f"{name}_bias"], 0)

    logits = []
    for image in images.astype(np.float64):
        x = convolved(convolved(image, "conv1"), "conv2")
        side = x.shape[0] // 2
        pooled = np.zeros((side, side, x.shape[-1]))
        for i in range(side):
            for j in range(side):
                square = x[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
                pooled[i, j] = square.max((0, 1))
        hidden = np.einsum("hwc,hwcf->f", pooled, p["dense"]) + p["dense_bias"]
        logits.append(np.maximum(hidden, 0) @ p["head"] + p["head_bias"])
    return np.array(logits)


def test_the_loss_is_that_of_the_equations():
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: draw.normal(size=x.shape).astype(np.float32),
        jax.eval_shape(lambda: SMALL.init(jax.random.key(0))),
    )
    batch = {
        "image": draw.normal(size=(5, 4, 4, 2)).astype(np.float32),
        "label": np.array([0, 2, 1, 1, 0], np.int32),
        "weights": np.array([1, 1, 1, 1, 0], np.float32),  # the last one is padding
    }
    loss, weight, others = SMALL.loss(params, batch, Sharder())
    logits = expected_logits(params, batch["image"])
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    right = batch["label"]
    assert loss == pytest.approx(-scores[np.arange(4), right[:4]].sum(), rel=1e-5)
    assert weight == 4
    is_right = logits.argmax(-1) == right
    assert set(others) == {"accuracy"}
    assert others["accuracy"] == is_right[:4].sum()
    found = SMALL.logits(params, batch["image"], Sharder())
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)


def test_parameters_and_flops_are_counted():
    convolutions = 9 * 2 * 4 + 4 + 9 * 4 * 6 + 6
    dense = 2 * 2 * 6 * 5 + 5 + 5 * 3 + 3
    assert SMALL.num_params() == convolutions + dense
    assert SMALL.model_flops({"label": np.zeros(7)}) == 6 * 7 * (
        16 * 9 * (2 * 4 + 4 * 6) + 4 * 6 * 5 + 5 * 3
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"size": 5}, "size must be a multiple of 2"),
        ({"widths": (4, 0)}, r"widths\[1\] must be >= 1, got 0"),
        ({"widths": (4, 5, 6)}, "widths must be two numbers"),
        ({"num_classes": 0}, "num_classes must be >= 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    "batch, facts, message",
    [
        ({"x": (5, 4)}, {}, "needs an array 'image', but the batch has only x"),
        ({"image": (5, 8, 8, 1), "label": (5,)}, {}, r"shape \(8, 8, 1\), but the"),
        (
            {"image": (5, 4, 4, 2), "label": (5,)},
            {"num_classes": 10},
            "10 classes, but the model's num_classes is 3",
        ),
    ],
)
def test_data_that_does_not_fit_is_refused(batch, facts, message):
    shapes = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in batch.items()}
    with pytest.raises(ValueError, match=message):
        SMALL.check_batch(shapes, facts)


# The same on every mesh: the config as it is shipped.


@functools.cache
def config() -> train.Config:
    loaded = config_files.load(["digits"], root=train.Config).config
    return dataclasses.replace(loaded, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def reference():
    prepared = short_runs.prepare(config(), "data=1", plan="data")
    return short_runs.run(prepared, prepared.program.step)


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_the_same_on_every_mesh(name, reference):
    mesh, plan, ways = LAYOUTS[name]
    prepared = short_runs.prepare(config(), mesh, plan=plan)
    found = {array.path: array.ways for array in prepared.layout.params.arrays}
    assert {path: found[path] for path in ways} == ways
    # This also checks that each array is sharded as planned, before and after.
    initial, losses, _ = short_runs.run(prepared, prepared.program.step)
    jax.tree.map(np.testing.assert_array_equal, initial, reference[0])
    # Sums in a different order differ in the last bits, which the steps may amplify.
    np.testing.assert_allclose(losses, reference[1], rtol=1e-5)
    assert losses[-1] < 0.7 * losses[0]


def test_predictions_are_the_likeliest_classes():
    model = convnet.Config(num_classes=3, size=4, widths=(4, 8), d_hidden=8)
    params = model.init(jax.random.key(0))
    image = jax.random.normal(jax.random.key(1), (8, 4, 4, 1))
    mesh = MeshSpec(fsdp=2, tensor=4).make()
    shard = Sharder(mesh, parse_plan("data+fsdp+tensor"))
    found = jax.jit(lambda p, x: model.predict(p, {"image": x}, shard))(params, image)
    scores = np.asarray(jax.nn.softmax(model.logits(params, image, Sharder())))
    assert found["class"].tolist() == scores.argmax(-1).tolist()
    np.testing.assert_allclose(found["probability"], scores.max(-1), rtol=1e-5)
