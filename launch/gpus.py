"""Divides the NVIDIA GPUs of a host among its processes."""

from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")


def share(
    env: Mapping[str, str], num_installed: int, local_id: int, local_count: int
) -> str | None:
    """Returns CUDA_VISIBLE_DEVICES for one of several processes on a host.

    None if there is nothing to divide. Neighbors stay together, so that a process gets
    the GPUs with the fastest links between them.
    """
    listed = [str(i) for i in range(num_installed)]
    if VARIABLE in env:
        listed = [name.strip() for name in env[VARIABLE].split(",") if name.strip()]
    if not listed or local_count == 1:
        return None
    each, rest = divmod(len(listed), local_count)
    if rest or not each:
        raise ValueError(
            f"this host has {len(listed)} GPUs ({','.join(listed)}), which cannot be "
            f"divided evenly among {local_count} processes. Change the number of "
            f"processes, or the GPUs listed in {VARIABLE}."
        )
    return ",".join(listed[local_id * each : (local_id + 1) * each])


def num_installed(driver: Path = DRIVER) -> int:
    """Returns how many GPUs the driver of this machine knows; 0 without a driver."""
    return len(list(driver.iterdir())) if driver.is_dir() else 0
