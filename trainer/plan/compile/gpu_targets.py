"""What XLA must know about a GPU to compile for it without one.

Peak, memory and bandwidth are those of the table in hardware.py. The rest is here, in
the terms of NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities" (limits of a
multiprocessor), and of the white papers "NVIDIA H100 Tensor Core GPU Architecture" and
"NVIDIA A100 Tensor Core GPU Architecture" (how many there are, caches).
"""

import dataclasses

from ...program.hardware import Device

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


def target_config(device: Device) -> str:
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
