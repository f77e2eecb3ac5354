"""A family that needs all of the contract: dropout, batch norm, augmentation by epoch.

Shapes: B batch, F features, H hidden units, C classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.models.dropout import dropout
from meshloom.trainer.data.shuffle import keys
from meshloom.trainer.program.optimizers import AdamW
from meshloom.trainer.program.schedules import WarmupCosine
from meshloom.trainer.run.train import Config

F, H, C = 12, 24, 6
NUM_EXAMPLES, BATCH = 60, 24
MOMENTUM = 0.9
AXES = {
    "up": ("embed", "mlp"),
    "down": ("mlp", "classes"),
    "bias": ("classes",),
}
VARIABLE_AXES = {
    "input": {"mean": ("embed",), "variance": ("embed",)},
    "hidden": {"mean": ("mlp",), "variance": ("mlp",)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noisy:
    """Batch norm, a matrix, batch norm, relu, dropout, a matrix to the classes.

    Attributes:
      by_batch: training normalizes by the (micro)batch, as batch norm does; False by
        the running averages, and then the loss is a sum over examples.
    """

    rate: float = 0.25
    by_batch: bool = True

    def init(self, key):
        up, down = jax.random.split(key)
        return {
            "up": 0.3 * jax.random.normal(up, (F, H)),
            "down": 0.3 * jax.random.normal(down, (H, C)),
            "bias": jnp.zeros(C),
        }

    def axes(self):
        return AXES

    def init_variables(self, key):
        sizes = {"input": F, "hidden": H}
        return {
            name: {"mean": jnp.zeros(size), "variance": jnp.ones(size)}
            for name, size in sizes.items()
        }

    def variable_axes(self):
        return VARIABLE_AXES

    def update_variables(self, variables, sums):
        def one(old, sums):
            mean = sums["sum"] / sums["count"]
            new = {"mean": mean, "variance": sums["square"] / sums["count"] - mean**2}
            return {k: MOMENTUM * old[k] + (1 - MOMENTUM) * new[k] for k in old}

        return {name: one(old, sums[name]) for name, old in variables.items()}

    def batch_axes(self):
        return {"x": ("batch", None), "label": ("batch",)}

    def check_batch(self, batch, facts):
        pass

    def loss(self, params, batch, shard, *, variables, key, train):
        p = {name: shard.weight(w, AXES[name]) for name, w in params.items()}
        sums = {}

        def normalized(x, name):
            sums[name] = {
                "count": jnp.float32(len(x)),
                "sum": jnp.sum(x, axis=0),
                "square": jnp.sum(x**2, axis=0),
            }
            mean, variance = (
                shard.weight(variables[name][k], VARIABLE_AXES[name][k])
                for k in ("mean", "variance")
            )
            if train and self.by_batch:
                mean = jnp.mean(x, axis=0)
                variance = jnp.mean(x**2, axis=0) - mean**2
            return (x - mean[None]) / jnp.sqrt(variance[None] + 1e-3)

        x = normalized(batch["x"], "input")
        x = shard(x @ p["up"], ("batch", "mlp"))
        x = jax.nn.relu(normalized(x, "hidden"))
        if train:
            x = shard(dropout(x, key, self.rate), ("batch", "mlp"))
        logits = x @ p["down"] + p["bias"][None]
        chosen = jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["label"], C)
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        others = {"accuracy": jnp.sum(right.astype(jnp.float32))}
        return -jnp.sum(chosen), jnp.float32(len(x)), others, sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Clusters of points, one a class; training shifts each row anew in every epoch."""

    seed: int = 3

    def open(self, split):
        return RowsSplit(self.seed, split)


class RowsSplit:
    def __init__(self, seed, split):
        self.seed = seed
        random = np.random.default_rng([seed, split == "eval"])
        self.labels = random.integers(0, C, NUM_EXAMPLES).astype(np.int32)
        centers = np.random.default_rng(seed).normal(size=(C, F))
        noise = random.normal(size=(NUM_EXAMPLES, F))
        self.x = (2 + centers[self.labels] + 0.5 * noise).astype(np.float32)

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, i):
        return {"x": self.x[i], "label": self.labels[i]}

    def example(self, i, epoch):
        """A pure function of (seed, sample, epoch)."""
        (seed,) = keys(self.seed, epoch * NUM_EXAMPLES + i)
        shift = np.random.default_rng(int(seed)).normal(size=F)
        return self[i] | {"x": self.x[i] + (0.1 * shift).astype(np.float32)}

    def describe(self):
        return {"source": "rows", "examples": len(self)}

    def loss_units(self, loss):
        return {}


CONFIG = Config(
    model=Noisy(),
    data=Rows(),
    optimizer=AdamW(),
    schedule=WarmupCosine(peak=0.02, warmup_share=0.2),
    batch_size=BATCH,
    num_steps=8,
    plan="data+fsdp+tensor",
    rules={"classes": "tensor"},
    log_every=2,
    eval_every=4,
    eval_batches=2,
    save_every=4,
)

# The same as a file.
CONFIG_TEXT = """
from __gin__ import dynamic_registration

import noisy
from meshloom.trainer.program import optimizers
from meshloom.trainer.program import schedules
from meshloom.trainer.run import train

train.Config:
  model = @noisy.Noisy()
  data = @noisy.Rows()
  optimizer = @optimizers.AdamW()
  schedule = @schedules.WarmupCosine()
  batch_size = 24
  num_steps = 8
  plan = "data+fsdp+tensor"
  rules = {"classes": "tensor"}
  eval_every = 4
  eval_batches = 2
  save_every = 4

schedules.WarmupCosine.peak = 0.02
"""
