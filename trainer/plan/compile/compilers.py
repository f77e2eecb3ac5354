"""How to run the compiler of a target: where it is, and what it must be told.

A compiler for devices that are not here is part of their driver: libtpu for TPUs, jax's
CUDA plugin for GPUs. Neither needs a device. The second also needs two things from
NVIDIA: `ptxas`, and cuDNN where attention is its kernel.

XLA must be told what a GPU is like. Peak, memory and bandwidth are those of the table
in hardware.py. The rest is here, in the terms of NVIDIA's CUDA C++ Programming Guide,
"Compute Capabilities" (limits of a multiprocessor), and of the white papers "NVIDIA
H100 Tensor Core GPU Architecture" and "NVIDIA A100 Tensor Core GPU Architecture" (how
many there are, caches).
"""

import dataclasses
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...program.hardware import Device, Target

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

_KIB, _MIB = 2**10, 2**20
# The same for both: threads of a block and a warp, registers, sizes of a grid.
_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 48 * _KIB,
    "registers_per_core_limit": 64 * _KIB,
    "registers_per_block_limit": 64 * _KIB,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
}
# The oldest cuDNN that jax 0.10 accepts; kernels come from the installed one.
_CUDNN = "major: 9 minor: 8"


@dataclasses.dataclass(frozen=True)
class Chip:
    """One GPU as its compiler sees it.

    Attributes:
      cores: multiprocessors; `lanes` are the float32 units of one.
      products: bfloat16 FLOPs of one multiprocessor in a cycle, which give the clock
        that the published peak is for.
      shared: bytes of fast memory of a multiprocessor, one KiB more than a block gets.
    """

    description: str
    capability: int
    cores: int
    lanes: int
    products: int
    shared: int
    cache: int


CHIPS = {
    "h100": Chip("NVIDIA H100 80GB HBM3", 9, 132, 128, 4096, 228 * _KIB, 50 * _MIB),
    "a100": Chip("NVIDIA A100-SXM4-80GB", 8, 108, 64, 2048, 164 * _KIB, 40 * _MIB),
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
            "target_config": _target_config(target.device),
        },
        {},
        (*_GPU_FLAGS, f"--xla_gpu_cuda_data_dir={_toolkit(target)}"),
    )


def _target_config(device: Device) -> str:
    """Returns XLA's GpuTargetConfigProto as text, for a device of the table."""
    chip = CHIPS[device.name]
    info = _LIMITS | {
        "core_count": chip.cores,
        "fpus_per_core": chip.lanes,
        "shared_memory_per_core": chip.shared,
        "shared_memory_per_block_optin": chip.shared - _KIB,
        "l2_cache_size": chip.cache,
        "clock_rate_ghz": round(device.flops / (chip.cores * chip.products) / 1e9, 3),
        "memory_bandwidth": int(device.hbm_bandwidth),
        "device_memory_size": int(device.hbm),
    }
    fields = " ".join(f"{name}: {value}" for name, value in info.items())
    return (
        f"gpu_device_info {{ {fields} "
        f"cuda_compute_capability {{ major: {chip.capability} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ {_CUDNN} }} '
        f'device_description_str: "{chip.description}"'
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
