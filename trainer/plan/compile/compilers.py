"""How to run the compiler of a target: where it is, and what it must be told.

A compiler for devices that are not here is part of their driver: libtpu for TPUs, jax's
CUDA plugin for GPUs. Neither needs a device. The second also needs two things from
NVIDIA: `ptxas`, and cuDNN where attention is its kernel.
"""

import dataclasses
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...program.hardware import Target
from .gpu_targets import CHIPS, target_config

# With no GPU to try products on, XLA's own kernels get the first tiling that there is.
# cuBLAS needs no choice, and most large products end up there after tuning too.
_GPU_FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")
# libtpu looks for the TPU machine that it runs on; nothing here needs one.
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "",
}


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A process with this environment and these XLA flags compiles for `topology`.

    Attributes:
      topology: arguments of jax.experimental.topologies.get_topology_desc.
    """

    topology: dict[str, Any]
    environment: dict[str, str]
    flags: tuple[str, ...] = ()


def find_compiler(target: Target) -> Compiler:
    """Returns the compiler of a target; an error says what is not installed."""
    if target.device.torus:
        return _tpu(target)
    if target.device.name in CHIPS:
        return _gpu(target)
    raise ValueError(
        f"--compile for {target.name}: a device of your own has no compiler. "
        f"Compile for a device of the table ({', '.join(CHIPS)} or a TPU), or leave "
        "out --compile."
    )


def _tpu(target: Target) -> Compiler:
    name = f"{target.device.name}:{'x'.join(map(str, target.shape))}"
    _need(target, "libtpu", "libtpu, the compiler for TPUs,", "tpu")
    topology: dict[str, Any] = {
        "platform": "tpu",
        "topology_name": name,
        "wrap": target.wrap,
    }
    if target.num_slices > 1:
        topology["num_slices"] = target.num_slices
    if target.device.name == "v4":
        # Both cores of a chip as one device, as they run; otherwise there are twice as
        # many devices.
        topology["chip_config_name"] = "megacore"
    return Compiler(topology, _NO_MACHINE)


def _gpu(target: Target) -> Compiler:
    plugin = "jax_cuda12_plugin"
    _need(target, plugin, "jax-cuda12-plugin, the compiler for GPUs,", "cuda-compile")
    (gpus,) = target.shape
    return Compiler(
        {
            "platform": "cuda",
            "topology": f"1x{target.num_slices}x{gpus}",
            "target_config": target_config(target.device),
        },
        {},
        (*_GPU_FLAGS, f"--xla_gpu_cuda_data_dir={_toolkit(target)}"),
    )


def _need(target: Target, module: str, what: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"--compile for {target.name}: {what} is not installed. Install it with "
            f"pip install 'meshloom[{extra}]', best in an environment of its own, and "
            "run the same command there."
        )


def _toolkit(target: Target) -> Path:
    """Returns the folder with NVIDIA's assembler and its device library."""
    looked = list(dict.fromkeys(_toolkits()))
    for folder in looked:
        if all((folder / part).exists() for part in ("bin/ptxas", "nvvm/libdevice")):
            return folder
    raise ValueError(
        f"--compile for {target.name}: no CUDA toolkit (bin/ptxas and nvvm/libdevice) "
        f"in {', '.join(map(str, looked))}. Install it with "
        "pip install nvidia-cuda-nvcc-cu12, or put the bin folder of one on PATH."
    )


def _toolkits() -> Iterator[Path]:
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels and wheels.submodule_search_locations) or ():
        yield Path(folder) / "cuda_nvcc"
    for command in ("ptxas", "nvcc"):
        if found := shutil.which(command):
            yield Path(found).resolve().parents[1]
    yield Path("/usr/local/cuda")
