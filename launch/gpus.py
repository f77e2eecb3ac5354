"""The share of a host's NVIDIA GPUs that each of its processes gets."""

from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")


def share(
    env: Mapping[str, str], num_installed: int, local_id: int, local_count: int
) -> str | None:
    """What CUDA_VISIBLE_DEVICES shall be for one of several processes on a host.

    None where there is nothing to divide. Neighbours stay together, so that a
    process's GPUs are those with the fastest links between them.
    """
    listed = [str(i) for i in range(num_installed)]
    if VARIABLE in env:
        listed = [name.strip() for name in env[VARIABLE].split(",") if name.strip()]
    if not listed or local_count == 1:
        return None
    each, rest = divmod(len(listed), local_count)
    if rest or not each:
        raise ValueError(
            f"this host has {len(listed)} GPUs ({','.join(listed)}) for {local_count} "
            f"processes, which do not divide them. Start a number of processes that "
            f"does, or show a number of GPUs that they divide in {VARIABLE}."
        )
    return ",".join(listed[local_id * each : (local_id + 1) * each])


def num_installed(driver: Path = DRIVER) -> int:
    """How many GPUs the driver of this machine knows; 0 without one."""
    return len(list(driver.iterdir())) if driver.is_dir() else 0
