"""The vision transformer: its arithmetic, dropout, pipelines and costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_runs

from meshloom.models import vit
from meshloom.models.attention import attend
from meshloom.sharding import MeshSpec, Sharder
from meshloom.trainer.config import files as config_files
from meshloom.trainer.plan import scenario
from meshloom.trainer.plan.memory import state_parts
from meshloom.trainer.program import hardware
from meshloom.trainer.program.schedules import Constant
from meshloom.trainer.run import train

pytestmark = pytest.mark.compiles_anew

SMALL = vit.Config(
    num_classes=3,
    size=4,
    channels=2,
    patch_size=2,
    num_layers=2,
    d_model=8,
    num_heads=2,
    d_ff=12,
    compute_dtype="float32",
)
DRAW = np.random.default_rng(0)
BATCH = {
    "image": DRAW.normal(size=(5, 4, 4, 2)).astype(np.float32),
    "label": np.array([0, 2, 1, 1, 0], np.int32),
    "weights": np.array([1, 1, 1, 1, 0], np.float32),  # the last one is padding
}


def made():
    draw = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: SMALL.init(jax.random.key(0)))
    return jax.tree.map(lambda x: np.float32(0.5 * draw.normal(size=x.shape)), shapes)


def normed(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def expected_logits(params, images):
    """Returns the logits in float64, one head at a time."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    logits = []
    for image in images.astype(np.float64):
        patches = [image[i : i + 2, j : j + 2].ravel() for i in (0, 2) for j in (0, 2)]
        x = np.array(patches) @ p["patch"] + p["patch_bias"] + p["position"]
        for i in range(SMALL.num_layers):
            b = jax.tree.map(lambda x, i=i: x[i], p["blocks"])
            a, m = b["attention"], b["mlp"]
            y = normed(x, b["attention_norm"])
            qkv = np.einsum("ld,dgrk->lgrk", y, a["qkv"]) + a["qkv_bias"]
            for h in range(SMALL.num_heads):
                q, k, v = (qkv[:, h, part] for part in range(3))
                scores = np.exp(q @ k.T / np.sqrt(4))
                x = x + scores / scores.sum(-1, keepdims=True) @ v @ a["out"][h]
            x = x + a["out_bias"]
            y = normed(x, b["mlp_norm"]) @ m["up"] + m["up_bias"]
            y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
            x = x + y @ m["down"] + m["down_bias"]
        x = normed(x, p["final_norm"]).mean(0)
        logits.append(x @ p["head"] + p["head_bias"])
    return np.array(logits)


def test_the_loss_is_that_of_the_equations():
    params = made()
    logits = expected_logits(params, BATCH["image"])
    found = SMALL.logits(params, BATCH["image"], Sharder())
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss, weight, others = SMALL.loss(params, BATCH, Sharder())
    nll = -scores[np.arange(4), BATCH["label"][:4]].sum()
    assert float(loss) == pytest.approx(nll, rel=1e-4)
    assert weight == 4
    assert others["accuracy"] == (logits.argmax(-1) == BATCH["label"])[:4].sum()


def test_dropout_is_of_training_alone_and_of_the_row():
    model = dataclasses.replace(SMALL, dropout=0.5)
    params, keys = made(), jax.random.split(jax.random.key(5), 5)

    def loss(rows, train):
        batch = {name: x[rows] for name, x in BATCH.items()}
        return float(
            model.loss(params, batch, Sharder(), key=keys[rows], train=train)[0]
        )

    every = np.arange(4)
    exact = float(SMALL.loss(params, BATCH, Sharder())[0])
    assert loss(every, train=False) == pytest.approx(exact, rel=1e-5)
    dropped = loss(every, train=True)
    assert abs(dropped - exact) > 0.1
    one_by_one = sum(loss(np.array([row]), train=True) for row in every)
    assert one_by_one == pytest.approx(dropped, rel=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_attention_that_is_not_causal_sees_all_positions(implementation):
    draw = np.random.default_rng(2)
    q, k, v = (draw.normal(size=(1, 128, 2, 16)).astype(np.float32) for _ in range(3))
    found = attend(q, k, v, Sharder(), causal=False, implementation=implementation)
    scores = np.exp(np.einsum("blhk,bshk->bhls", q, k) / 4)
    shares = scores / scores.sum(-1, keepdims=True)
    expected = np.einsum("bhls,bshk->blhk", shares, v)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@functools.cache
def config(**changes) -> train.Config:
    loaded = config_files.load(["digits_vit"], root=train.Config).config
    model = dataclasses.replace(loaded.model, num_layers=4, **changes)
    return dataclasses.replace(
        loaded, num_steps=20, schedule=Constant(value=1e-3), model=model
    )


@functools.cache
def reference(**changes):
    prepared = short_runs.prepare(config(**changes), "data=1")
    return short_runs.run(prepared, prepared.program.step)


@pytest.mark.parametrize(
    ("mesh", "changes", "ways"),
    [
        (
            "pipe=4,fsdp=2",
            {},
            {"blocks/mlp/up": 8, "patch": 8, "blocks/mlp/up_bias": 4},
        ),
        ("fsdp=2,tensor=2", {"dropout": 0.1}, {"blocks/mlp/up": 4, "position": 2}),
    ],
)
def test_training_is_the_same_in_a_pipeline_and_with_dropout(mesh, changes, ways):
    prepared = short_runs.prepare(config(**changes), mesh)
    found = {array.path: array.ways for array in prepared.layout.params.arrays}
    assert {path: found[path] for path in ways} == ways
    initial, losses, _ = short_runs.run(prepared, prepared.program.step)
    jax.tree.map(np.testing.assert_array_equal, initial, reference(**changes)[0])
    np.testing.assert_allclose(losses, reference(**changes)[1], rtol=1e-5)
    assert losses[-1] < losses[0]


def test_a_pipeline_refuses_dropout():
    with pytest.raises(ValueError, match="Config.loss takes key, train, but a pipe"):
        short_runs.prepare(config(dropout=0.1), "pipe=4")


def test_a_forecast_counts_all_products():
    """Every product of a step, forward, and twice as much backward."""
    target = hardware.parse_target("v5e-8")
    case = scenario.make_case(config(), target)
    model, rows = case.config.model, case.config.batch_size
    forward = sum(p.flops for p in case.costs.products) * model.num_layers
    patches = 2 * rows * 16 * 4 * 64  # outside of blocks and head
    flops = 3 * (forward + case.costs.head.flops + patches)
    assert flops == model.model_flops({"inputs": np.zeros((rows, 16))})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaged(vit.Config):
    """With running averages that nothing updates."""

    def init_variables(self, key):
        return {"mean": jnp.zeros(64), "hidden": jnp.zeros((4, 128))}

    def variable_axes(self):
        return {"mean": ("embed",), "hidden": ("layer", "mlp")}


def test_a_forecast_counts_variables():
    shipped = config()
    fields = {
        f.name: getattr(shipped.model, f.name) for f in dataclasses.fields(vit.Config)
    }
    mesh = MeshSpec.parse("fsdp=4,tensor=2")
    parts = {}
    for model in (shipped.model, Averaged(**fields)):
        changed = dataclasses.replace(shipped, model=model, mesh=mesh)
        case = scenario.make_case(changed, hardware.parse_target("h100-1x8"))
        parts[type(model)] = {part.name: part.bytes for part in state_parts(case)}
    more = {"variables": 4 * (64 // 4 + 4 * 128 // 2)}
    assert parts[Averaged] == parts[vit.Config] | more
    assert "variables" not in parts[vit.Config]


def test_parameters_are_counted():
    block = 8 * 24 + 24 + 8 * 8 + 8 + 8 * 12 + 12 + 12 * 8 + 8 + 4 * 8
    assert SMALL.num_params() == 8 * 8 + 8 + 4 * 8 + 2 * block + 16 + 8 * 3 + 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"patch_size": 3}, "size 4 must be a multiple of patch_size 3"),
        ({"num_heads": 3}, "d_model 8 must be a multiple of num_heads 3"),
        ({"num_layers": 0}, "num_layers must be positive"),
        ({"remat": "some"}, "remat must be one of"),
        ({"dropout": -1.0}, "dropout must be >= 0 and < 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
