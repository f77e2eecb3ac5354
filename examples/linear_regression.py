"""Linear regression on a table: python examples/linear_regression.py data=2,fsdp=2"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_diabetes

from meshloom.sharding import MeshSpec, parse_plan
from meshloom.trainer.program.build import build

AXES = {"w": ("embed",), "b": ()}


@dataclasses.dataclass(frozen=True)
class LinearRegression:
    def init(self, key):
        return {"w": jnp.zeros(10), "b": jnp.zeros(())}

    def axes(self):
        return AXES

    def batch_axes(self):
        return {"x": ("batch", None), "y": ("batch",)}

    def check_batch(self, batch, facts):
        pass

    def loss(self, params, batch, shard):
        p = shard.weights(params, AXES)
        error = batch["x"] @ p["w"] + p["b"] - batch["y"]
        return jnp.sum(error**2), jnp.float32(len(error)), {}


x, y = (column.astype(np.float32)[:440] for column in load_diabetes(return_X_y=True))
batch = {"x": x / x.std(0), "y": (y - y.mean()) / y.std()}
jax.config.update("jax_num_cpu_devices", 8)
spec = MeshSpec.parse(sys.argv[1] if len(sys.argv) > 1 else "data=1")
mesh = spec.make(jax.devices()[: spec.abstract().size])
tx, rules = optax.sgd(0.05), parse_plan("data+fsdp+tensor")
program = build(LinearRegression(), tx, mesh, rules, batch)
state = program.init(jax.random.key(0))
batch = jax.device_put(batch, program.batch_shardings)
for step in range(1, 201):
    state, metrics = program.step(state, batch)
    if step <= 20 or step % 50 == 0:
        print(f"step {step}: squared error {metrics['loss']:.6f}")
print("w", state.params["w"].sharding.spec, np.round(state.params["w"], 3).tolist())
