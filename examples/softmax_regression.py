"""Classes of rows of a table: python examples/softmax_regression.py data=2,fsdp=2"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_wine

from meshloom.sharding import MeshSpec, parse_plan
from meshloom.trainer.program.build import build

AXES = {"w": ("embed", None), "b": (None,)}


@dataclasses.dataclass(frozen=True)
class SoftmaxRegression:
    def init(self, key):
        return {"w": jnp.zeros((12, 3)), "b": jnp.zeros(3)}

    def axes(self):
        return AXES

    def batch_axes(self):
        return {"x": ("batch", None), "y": ("batch",)}

    def check_batch(self, batch, facts):
        pass

    def loss(self, params, batch, shard):
        p = shard.weights(params, AXES)
        logits = batch["x"] @ p["w"] + p["b"][None]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        right = jnp.sum(jnp.argmax(logits, axis=-1) == batch["y"])
        return jnp.sum(nll), jnp.float32(len(nll)), {"accuracy": right}


x, y = load_wine(return_X_y=True)
x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
batch = {"x": x[:176, :12], "y": y[:176].astype(np.int32)}
jax.config.update("jax_num_cpu_devices", 8)
spec = MeshSpec.parse(sys.argv[1] if len(sys.argv) > 1 else "data=1")
mesh = spec.make(jax.devices()[: spec.abstract().size])
tx, rules = optax.adam(0.05), parse_plan("data+fsdp+tensor")
program = build(SoftmaxRegression(), tx, mesh, rules, batch)
state = program.init(jax.random.key(0))
batch = jax.device_put(batch, program.batch_shardings)
for step in range(1, 101):
    state, metrics = program.step(state, batch)
    if step <= 20 or step % 20 == 0:
        loss, right = metrics["loss"], metrics["accuracy"]
        print(f"step {step}: loss {loss:.6f}, accuracy {right:.4f}")
print("w", state.params["w"].sharding.spec)
