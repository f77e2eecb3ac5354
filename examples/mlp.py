"""A hidden layer on a table: python examples/mlp.py data=2,fsdp=2,tensor=2"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer

from meshloom.sharding import MeshSpec, parse_plan
from meshloom.trainer.program.build import build

AXES = {"up": ("embed", "mlp"), "bias": ("mlp",), "down": ("mlp", "embed")}
SHAPES = {"up": (30, 64), "bias": (64,), "down": (64, 2)}


@dataclasses.dataclass(frozen=True)
class MLP:
    def init(self, key):
        keys = dict(zip(SHAPES, jax.random.split(key, len(SHAPES)), strict=True))
        draw = jax.random.normal
        return {name: 0.2 * draw(keys[name], shape) for name, shape in SHAPES.items()}

    def axes(self):
        return AXES

    def batch_axes(self):
        return {"x": ("batch", None), "y": ("batch",)}

    def check_batch(self, batch, facts):
        pass

    def loss(self, params, batch, shard):
        p = shard.weights(params, AXES)
        hidden = jnp.tanh(batch["x"] @ p["up"] + p["bias"][None])
        logits = shard(hidden, ("batch", "mlp")) @ p["down"]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        right = jnp.sum(jnp.argmax(logits, axis=-1) == batch["y"])
        return jnp.sum(nll), jnp.float32(len(nll)), {"accuracy": right}


x, y = load_breast_cancer(return_X_y=True)
x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
batch = {"x": x[:568], "y": y[:568].astype(np.int32)}
jax.config.update("jax_num_cpu_devices", 8)
spec = MeshSpec.parse(sys.argv[1] if len(sys.argv) > 1 else "data=1")
mesh = spec.make(jax.devices()[: spec.abstract().size])
tx, rules = optax.adam(0.01), parse_plan("data+fsdp+tensor")
program = build(MLP(), tx, mesh, rules, batch)
state = program.init(jax.random.key(0))
batch = jax.device_put(batch, program.batch_shardings)
for step in range(1, 101):
    state, metrics = program.step(state, batch)
    if step <= 20 or step % 20 == 0:
        loss, right = metrics["loss"], metrics["accuracy"]
        print(f"step {step}: loss {loss:.6f}, accuracy {right:.4f}")
print("up", state.params["up"].sharding.spec)
