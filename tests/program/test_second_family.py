"""Tests that the trainer trains an unknown model: a classifier of handwritten digits.

Nothing here is a language model: the examples are images with a label, the model is a
plain dict of arrays, and both are classes of this file.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from sklearn.datasets import load_digits

from meshloom.sharding import MeshSpec
from meshloom.trainer.checkpoint.manager import latest_step
from meshloom.trainer.commands.forecast_observer import ForecastObserver
from meshloom.trainer.data import Order
from meshloom.trainer.data.batches import device_batches
from meshloom.trainer.program.optimizers import AdamW
from meshloom.trainer.program.schedules import WarmupCosine
from meshloom.trainer.run import loop, sampling
from meshloom.trainer.run.prepare import prepare
from meshloom.trainer.run.train import Config, train


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier:
    """Two layers. It uses the standard names with this meaning:
    embed is a pixel, mlp a hidden unit, norm a class.
    """

    num_hidden: int = 32

    def init(self, key):
        up, down = jax.random.split(key)
        return {
            "up": 0.1 * jax.random.normal(up, (64, self.num_hidden)),
            "up_bias": jnp.zeros(self.num_hidden),
            "down": 0.1 * jax.random.normal(down, (self.num_hidden, 10)),
            "down_bias": jnp.zeros(10),
        }

    def axes(self):
        return {
            "up": ("embed", "mlp"),
            "up_bias": ("mlp",),
            "down": ("mlp", "norm"),
            "down_bias": ("norm",),
        }

    def batch_axes(self):
        return {"image": ("batch", None), "label": ("batch",)}

    def check_batch(self, batch, facts):
        if batch["image"].shape[1:] != (64,):
            raise ValueError(f"images must have 64 pixels, got {batch['image'].shape}")

    def loss(self, params, batch, shard):
        axes = self.axes()
        p = {name: shard.weight(w, axes[name]) for name, w in params.items()}
        hidden = jax.nn.relu(batch["image"] @ p["up"] + p["up_bias"][None])
        hidden = shard(hidden, ("batch", "mlp"))
        logits = hidden @ p["down"] + p["down_bias"][None]
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        nll = -jnp.sum(
            jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["label"], 10), axis=-1
        )
        count = jnp.asarray(len(nll), jnp.float32)
        return jnp.sum(nll), count, {"accuracy": jnp.sum(right.astype(jnp.float32))}

    def model_flops(self, batch):
        return 6.0 * batch["label"].shape[0] * self.num_hidden * (64 + 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits:
    """Scikit-learn's 1797 images of 8 x 8 pixels; every sixth is held out."""

    def open(self, split):
        return DigitsSplit(split)


class DigitsSplit:
    unit = "images"

    def __init__(self, split):
        images, labels = load_digits(return_X_y=True)
        held_out = np.arange(len(labels)) % 6 == 0
        chosen = held_out if split == "eval" else ~held_out
        self.images = (images[chosen] / 16).astype(np.float32)
        self.labels = labels[chosen].astype(np.int32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"image": self.images[i], "label": self.labels[i]}

    def describe(self):
        return {"source": "digits", "examples": len(self)}

    def loss_units(self, loss):
        return {"likelihood": float(np.exp(-loss))}


CONFIG = Config(
    model=Classifier(),
    data=Digits(),
    optimizer=AdamW(),
    schedule=WarmupCosine(peak=0.01, warmup_share=0.1),
    batch_size=64,
    num_steps=150,
    mesh=MeshSpec(data=2, fsdp=2, tensor=2),
    log_every=20,
    eval_every=75,
    eval_batches=4,
    save_every=75,
)
WHAT_IS_SHARDED = {
    "up": (32, 16),
    "up_bias": (16,),
    "down": (16, 10),
    "down_bias": (10,),
}


def run(workdir, config=CONFIG, **options):
    with open(workdir.parent / "screen.txt", "a") as screen:
        options = {"observer": ForecastObserver()} | options
        return train(config, workdir=workdir, console=Console(file=screen), **options)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("digits") / "run"
    return workdir, run(workdir)


def held_out_accuracy(params):
    data = Digits().open("eval")
    hidden = np.maximum(data.images @ params["up"] + params["up_bias"], 0)
    logits = hidden @ params["down"] + params["down_bias"]
    return np.mean(np.argmax(logits, axis=-1) == data.labels)


def test_learns_digits_on_a_sharded_mesh(finished):
    _, state = finished
    assert state.step == 150
    for name, shape in WHAT_IS_SHARDED.items():
        assert state.params[name].addressable_shards[0].data.shape == shape
    assert held_out_accuracy(jax.device_get(state.params)) > 0.9


def test_leaves_a_complete_run_folder(finished):
    workdir, _ = finished
    train_rows = rows(workdir / "metrics.jsonl")
    assert [row["step"] for row in train_rows] == list(range(1, 151))
    assert train_rows[-1]["accuracy"] > 0.9
    eval_rows = rows(workdir / "eval.jsonl")
    assert [row["step"] for row in eval_rows] == [75, 150]
    assert eval_rows[-1]["accuracy"] > 0.9
    assert eval_rows[-1]["likelihood"] == pytest.approx(np.exp(-eval_rows[-1]["loss"]))
    assert latest_step(workdir / "checkpoints") == 150
    assert any("images_per_s" in row for row in train_rows)
    report = (workdir / "report.html").read_text()
    assert "Images per second" in report and "images/s" in report
    shown = (workdir.parent / "screen.txt").read_text()
    assert "images/s" in shown
    for text in (shown, json.dumps(train_rows), report.lower()):
        assert "tokens/s" not in text and "tokens per" not in text
        assert "tokens_per" not in text
    assert not (workdir / "sample.txt").exists()


def test_resumes_to_the_same_bits(finished, tmp_path):
    """A run that fails after step 75 and is restarted ends like one that did not."""
    workdir, expected = finished

    def fail(step, state):
        raise OSError("the machine is gone")

    fail.every = 100
    with pytest.raises(OSError, match="gone"):
        run(tmp_path / "run", hooks=[fail])
    assert latest_step(tmp_path / "run" / "checkpoints") == 75
    state = run(tmp_path / "run")
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)
    losses = [row["loss"] for row in rows(tmp_path / "run" / "metrics.jsonl")]
    assert losses == [row["loss"] for row in rows(workdir / "metrics.jsonl")]


def test_a_complete_run_is_left_as_it_is(finished):
    workdir, expected = finished
    before = (workdir / "metrics.jsonl").read_text()
    state = run(workdir)
    assert np.array_equal(state.params["up"], expected.params["up"])
    assert (workdir / "metrics.jsonl").read_text() == before
    assert "complete at step 150" in (workdir.parent / "screen.txt").read_text()


def test_parity_with_one_device(finished):
    workdir, _ = finished
    config = dataclasses.replace(CONFIG, mesh=MeshSpec())
    prepared = prepare(config, devices=jax.devices()[:1])
    losses = []
    with device_batches(
        prepared.train_data,
        Order(len(prepared.train_data), config.seed),
        batch_size=config.batch_size,
        shardings=prepared.program.batch_shardings,
        start=0,
        stop=20,
    ) as batches:
        loop.run(
            prepared.program.step,
            prepared.layout.create(jax.random.key(config.seed), prepared.mesh),
            batches,
            start=0,
            num_steps=20,
            record=lambda rows: losses.extend(row["loss"] for row in rows),
        )
    cut = [row["loss"] for row in rows(workdir / "metrics.jsonl")][:20]
    # Float32 sums in a different order.
    np.testing.assert_allclose(losses, cut, rtol=1e-5)


def test_data_the_model_does_not_know_is_an_error():
    class Odd(DigitsSplit):
        def __getitem__(self, i):
            return super().__getitem__(i) | {"weight": np.float32(1)}

    class OddDigits(Digits):
        def open(self, split):
            return Odd(split)

    config = dataclasses.replace(CONFIG, data=OddDigits())
    with pytest.raises(ValueError, match="'weight'.*takes image, label"):
        prepare(config)


def test_a_unit_must_name_a_figure():
    class Odd(DigitsSplit):
        unit = "frames per clip"

    class OddDigits(Digits):
        def open(self, split):
            return Odd(split)

    config = dataclasses.replace(CONFIG, data=OddDigits())
    with pytest.raises(ValueError, match="dataset Odd: unit is 'frames per clip'"):
        prepare(config)


def test_text_cannot_be_sampled_from_it():
    with pytest.raises(ValueError, match="Classifier with data Digits cannot generate"):
        sampling.check(CONFIG, "once", 20)
