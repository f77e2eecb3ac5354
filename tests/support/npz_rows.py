"""A user's own data and model: rows with labels in an npz file, a linear classifier."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.sharding import MeshSpec
from meshloom.trainer.program.optimizers import AdamW
from meshloom.trainer.program.schedules import Constant
from meshloom.trainer.run.train import Config

NUM_FEATURES, NUM_CLASSES = 8, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """embed is a feature, norm a class: standard names with a meaning of our own."""

    def init(self, key):
        return {"w": 0.1 * jax.random.normal(key, (NUM_FEATURES, NUM_CLASSES))}

    def axes(self):
        return {"w": ("embed", "norm")}

    def batch_axes(self):
        return {"x": ("batch", None), "label": ("batch",), "weights": ("batch",)}

    def check_batch(self, batch, facts):
        pass

    def loss(self, params, batch, shard):
        logits = batch["x"] @ shard.weight(params["w"], ("embed", "norm"))
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        chosen = jax.nn.log_softmax(logits) * jax.nn.one_hot(
            batch["label"], NUM_CLASSES
        )
        weights = batch["weights"]
        loss = -jnp.sum(weights * jnp.sum(chosen, axis=-1))
        return loss, jnp.sum(weights), {"accuracy": jnp.sum(weights * right)}

    def model_flops(self, batch):
        return 6.0 * batch["label"].shape[0] * NUM_FEATURES * NUM_CLASSES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Npz:
    """The splits of one npz file: arrays `train_x`, `train_label`, `eval_x` ..."""

    path: str

    def open(self, split):
        return NpzSplit(self.path, split)


class NpzSplit:
    def __init__(self, path, split):
        with np.load(path) as file:
            self.x, self.label = file[f"{split}_x"], file[f"{split}_label"]

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return {"x": self.x[i], "label": self.label[i]}

    def describe(self):
        return {"source": "npz", "examples": len(self)}

    def loss_units(self, loss):
        return {}


def write(path: Path, *, num_train=96, num_eval=40, dtype=np.float32, **changes) -> str:
    """Writes an npz file; `changes` replace arrays of it by name."""
    draw = np.random.default_rng(0)
    arrays = {}
    for split, num in (("train", num_train), ("eval", num_eval), ("test", num_eval)):
        x = draw.normal(size=(num, NUM_FEATURES))
        arrays[f"{split}_x"] = x.astype(dtype)
        arrays[f"{split}_label"] = np.argmax(x[:, :NUM_CLASSES], -1).astype(np.int32)
    np.savez(path, **{**arrays, **changes})
    return str(path)


def config(path: str, **settings) -> Config:
    values = {
        "model": Linear(),
        "data": Npz(path=path),
        "optimizer": AdamW(),
        "schedule": Constant(value=0.05),
        "batch_size": 16,
        "num_steps": 8,
        "mesh": MeshSpec(data=-1, fsdp=2),
        "log_every": 4,
        "eval_every": 4,
        "eval_batches": 2,
        "save_every": 4,
        "check_replicas_every": 0,
    }
    return Config(**(values | settings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bigrams:
    """Text, each byte predicted from the one before: the smallest language model."""

    def init(self, key):
        return {"table": 0.1 * jax.random.normal(key, (264, 264))}

    def axes(self):
        return {"table": ("embed", "norm")}

    def batch_axes(self):
        names = ("inputs", "targets", "weights")
        return dict.fromkeys(names, ("batch", None))

    def check_batch(self, batch, facts):
        pass

    def loss(self, params, batch, shard):
        table = shard.weight(params["table"], ("embed", "norm"))
        scores = jax.nn.log_softmax(table[batch["inputs"]])
        chosen = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)
        weights = batch["weights"]
        return -jnp.sum(weights * chosen[..., 0]), jnp.sum(weights), {}

    def model_flops(self, batch):
        return 6.0 * batch["inputs"].size * 264
