"""Trains with `Program` in your own loop, without a run folder or a config file.

python examples/own_loop.py "data=2,fsdp=2"
"""

import sys

import jax
import numpy as np

from meshloom.models import transformer
from meshloom.sharding import MeshSpec, parse_plan
from meshloom.trainer.program import optimizers, schedules
from meshloom.trainer.program.build import build

BATCH, LENGTH, STEPS = 16, 64, 20
spec = MeshSpec.parse(sys.argv[1] if len(sys.argv) > 1 else "data=1")
jax.config.update("jax_num_cpu_devices", spec.abstract().size)
mesh = spec.make()
model = transformer.Config(
    vocab_size=256, num_layers=2, d_model=64, num_heads=4, d_ff=256, max_length=LENGTH
)
text = np.frombuffer(open(__file__, "rb").read(), np.uint8).astype(np.int32)
random = np.random.default_rng(0)


def next_batch():
    starts = random.integers(0, len(text) - LENGTH - 1, (BATCH, 1))
    rows = text[starts + np.arange(LENGTH + 1)]
    weights = np.ones((BATCH, LENGTH), np.float32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


program = build(
    model,
    optimizers.AdamW(),
    mesh,
    parse_plan("data+fsdp+tensor"),
    next_batch(),
    learning_rate=schedules.WarmupCosine(peak=3e-3, warmup_share=0.1).make(STEPS),
    max_grad_norm=1.0,
)
state = program.init(jax.random.key(0))
for step in range(1, STEPS + 1):
    batch = jax.device_put(next_batch(), program.batch_shardings)
    state, metrics = program.step(state, batch)
    print(f"step {step}: loss {metrics['loss']:.4f}")
