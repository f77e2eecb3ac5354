"""The devices of a run as a Target.

Accelerators have their numbers from the table of hardware.py. Nobody publishes those of
a CPU, so its matrix products and its memory are timed, in less than half a second, and
all devices simulated on it share the result.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

from ..program.hardware import CPU, Device, Target
from ..program.peaks import measure_bandwidth, peak_flops, planned_device


def target_here(
    devices: Sequence[Any], dtype: str, hosts: Sequence[str] = ()
) -> Target:
    """Returns the target that these devices form; a ValueError says why they do not.

    Args:
      devices: of the mesh, as jax has them.
      dtype: of matrix products.
      hosts: the host of each process, where there are several.
    """
    if devices[0].platform == "cpu":
        return _cpu(devices, dtype)
    device, peak = _published(devices), peak_flops(devices[0], dtype)
    if peak is None:
        raise ValueError(f"the figures of {device.name} in {dtype} are not known")
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    device = dataclasses.replace(
        device, flops=peak.flops, available=limit or device.available
    )
    return _joined(device, devices, len(set(hosts)) or 1)


def published_target(devices: Sequence[Any]) -> Target:
    """As `target_here`, from published figures alone: the same in all processes."""
    device = _published(devices)
    # A node is what jax calls a slice, otherwise the devices of one process.
    node = [getattr(d, "slice_index", None) for d in devices]
    nodes = len(set(node if None not in node else [d.process_index for d in devices]))
    return _joined(device, devices, nodes)


def _published(devices: Sequence[Any]) -> Device:
    """Returns the row of hardware.py's table for devices that are all of one kind."""
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(f"the devices differ: {', '.join(kinds)}")
    if (found := planned_device(kinds[0])) is None:
        raise ValueError(f"the figures of {kinds[0]} are not known")
    return found


def _joined(device: Device, devices: Sequence[Any], nodes: int) -> Target:
    if device.torus:
        return _slices(device, devices)
    each, rest = divmod(len(devices), nodes)
    if rest:
        raise ValueError(
            f"{len(devices)} devices are not spread evenly on {nodes} nodes"
        )
    return Target(f"{device.name}:{nodes}x{each}", device, (each,), nodes)


def _cpu(devices: Sequence[Any], dtype: str) -> Target:
    if len({device.process_index for device in devices}) > 1:
        raise ValueError("how CPU processes share cores and network is not known")
    num, peak = len(devices), peak_flops(devices[0], dtype)
    assert peak is not None
    bandwidth = measure_bandwidth()
    # To send is to read and to write in the memory that all devices share.
    device = Device(
        name=CPU,
        flops=peak.flops / num,
        hbm=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / num,
        hbm_bandwidth=bandwidth / num,
        link=bandwidth / 2 / num,
        network=bandwidth / 2 / num,
        source="measured here",
    )
    return Target(f"{CPU}:1x{num}", device, (num,))


def _slices(device: Device, devices: Sequence[Any]) -> Target:
    """Returns whole slices; the coordinates of their chips give the shape."""
    slices: dict[int, list[Any]] = {}
    for one in devices:
        slices.setdefault(getattr(one, "slice_index", 0), []).append(one.coords)
    shapes = {
        tuple(max(line) - min(line) + 1 for line in zip(*coords, strict=True))
        for coords in slices.values()
    }
    whole = len(shapes) == 1 and math.prod(*shapes) * len(slices) == len(devices)
    (shape, *_) = shapes
    if not whole or any(size > 1 for size in shape[device.torus :]):
        raise ValueError(f"{len(devices)} {device.name} devices are not whole slices")
    shape = shape[: device.torus]
    many = f"{len(slices)}x" if len(slices) > 1 else ""
    name = f"{many}{device.name}:{'x'.join(map(str, shape))}"
    return Target(name, device, shape, len(slices))
