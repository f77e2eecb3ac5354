"""Peak FLOP/s of devices, and the memory bandwidth of this CPU."""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .hardware import DEVICES, Device

NUM_BYTES = 2**26  # of an array that is larger than most caches


@dataclasses.dataclass(frozen=True)
class Peak:
    """A peak and its name; `label` completes the sentence "31 % of the ..."."""

    flops: float
    label: str


# jax's names of the devices in the table of hardware.py.
_PLANNED = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100",
}

# Dense bfloat16 FLOP/s of one jax device. Source: cloud.google.com/tpu/docs, the
# page of each version ("peak compute per chip"). On v2, v3 and TPU7x a jax device
# is one of the two cores of a chip, so it has half the published figure.
_TPU_BF16 = {
    "TPU v2": 45e12 / 2,
    "TPU v3": 123e12 / 2,
    **{k: DEVICES[n].flops for k, n in _PLANNED.items() if k.startswith("TPU")},
    "TPU7x": 2307e12 / 2,
}


def planned_device(kind: str) -> Device | None:
    """Returns the row of hardware.py's table for jax's device kind, if it has one."""
    return DEVICES[_PLANNED[kind]] if kind in _PLANNED else None


def _tensor_cores(bf16: float, tf32: float) -> dict[str, Peak]:
    half = Peak(bf16, "bf16 peak")
    # From Ampere on, float32 matmuls run as TF32 at jax's default precision.
    return {"bfloat16": half, "float16": half, "float32": Peak(tf32, "tf32 peak")}


def _volta(fp16: float, fp32: float) -> dict[str, Peak]:
    return {"float16": Peak(fp16, "fp16 peak"), "float32": Peak(fp32, "fp32 peak")}


# Dense FLOP/s of one GPU. Source: the data sheets of nvidia.com/data-center; their
# figures "with sparsity" are twice these. The first pattern that matches the device
# kind wins, so longer names come before shorter ones.
_GPU = (
    (r"\bB200\b", _tensor_cores(2250e12, 1100e12)),
    (r"\bH200 NVL\b", _tensor_cores(835.5e12, 417.5e12)),
    (r"\bH200\b", _tensor_cores(989.5e12, 494.5e12)),
    (r"\bH100 PCIe\b", _tensor_cores(756.5e12, 378e12)),
    (r"\bH100 NVL\b", _tensor_cores(835.5e12, 417.5e12)),
    (r"\bH100 80GB HBM3\b", _tensor_cores(DEVICES["h100"].flops, 494.5e12)),
    (r"\bA100\b", _tensor_cores(DEVICES["a100"].flops, 156e12)),
    (r"\bL4\b", _tensor_cores(121e12, 60e12)),
    (r"\bV100-SXM2\b", _volta(125e12, 15.7e12)),
    (r"\bV100-PCIE\b", _volta(112e12, 14e12)),
)


def peak_flops(device: Any, dtype: Any) -> Peak | None:
    """Returns the peak of one device, or None if it is not known.

    On CPU it is measured, and it is the peak of the entire machine, because CPU devices
    share the cores.
    """
    name = jnp.dtype(dtype).name
    if device.platform == "cpu":
        return measure_matmul_peak(name)
    kind = device.device_kind
    if device.platform == "tpu":
        # At jax's default precision a float32 matmul is one bfloat16 pass on TPU.
        if kind in _TPU_BF16 and name in ("bfloat16", "float32"):
            return Peak(_TPU_BF16[kind], "bf16 peak")
        return None
    # A MIG slice has the name of the full GPU but only some of its units.
    if "MIG" in kind:
        return None
    for pattern, peaks in _GPU:
        if re.search(pattern, kind):
            return peaks.get(name)
    return None


def total_peak(devices: Sequence[Any], dtype: Any) -> Peak | None:
    """Returns the combined peak of all devices of a mesh, or None if not known."""
    if len({(device.platform, device.device_kind) for device in devices}) != 1:
        return None
    if devices[0].platform != "cpu":
        peak = peak_flops(devices[0], dtype)
        return peak and Peak(peak.flops * len(devices), peak.label)
    # CPU processes may or may not share a machine, and jax does not say which.
    if len({device.process_index for device in devices}) != 1:
        return None
    return peak_flops(devices[0], dtype)


@functools.cache
def measure_matmul_peak(dtype: str, budget: float = 0.3) -> Peak:
    """Times square matmuls on this machine's CPU and returns the fastest.

    Args:
      budget: seconds to measure, excluding compilation, which happens once per size.
    """
    cpu = jax.local_devices(backend="cpu")[0]
    deadline = time.perf_counter() + budget
    best, size, seconds = 0.0, 512, 0.0
    # More cores need larger matrices: double the size, which takes 8 times as long,
    # while that leaves time for several runs.
    while 8 * seconds < budget / 16:
        x = jax.device_put(np.ones((size, size), jnp.dtype(dtype)), cpu)
        matmul = jax.jit(jnp.matmul).lower(x, x).compile()
        seconds = min(_seconds(matmul, x) for _ in range(3))
        best = max(best, 2 * size**3 / seconds)
        size *= 2
    while time.perf_counter() + seconds < deadline:
        best = max(best, 2 * (size // 2) ** 3 / _seconds(matmul, x))
    return Peak(best, "measured matmul peak")


@functools.cache
def measure_bandwidth() -> float:
    """Returns the best bytes per second of negating a large array on this CPU."""
    cpu = jax.local_devices(backend="cpu")[0]
    # In place, because the system has to clear new memory first.
    negate = jax.jit(jnp.negative, donate_argnums=0)
    x, fastest = negate(jnp.zeros(NUM_BYTES // 4, jnp.float32, device=cpu)), math.inf
    for _ in range(4):
        start = time.perf_counter()
        x = jax.block_until_ready(negate(x))
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * NUM_BYTES / fastest  # each byte is read and written


def _seconds(matmul: Callable[[Any, Any], Any], x: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(matmul(x, x))
    return time.perf_counter() - start
