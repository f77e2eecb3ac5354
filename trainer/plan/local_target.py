"""The devices that a run has, as a target of a plan.

Accelerators have their numbers from the table of hardware.py. Of a CPU nobody publishes
them: its matrix products and its memory are timed here, in less than half a second,
and all devices that are simulated on it share what was found.
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
    """The target that these devices are; a ValueError says why they are none.

    Args:
      devices: of the mesh, as jax has them.
      dtype: that products are computed in.
      hosts: the host of each process, where there are several.
    """
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(f"the devices differ: {', '.join(kinds)}")
    first = devices[0]
    if first.platform == "cpu":
        return _cpu(devices, dtype)
    device, peak = planned_device(kinds[0]), peak_flops(first, dtype)
    if device is None or peak is None:
        raise ValueError(f"the numbers of {kinds[0]} in {dtype} are not known")
    available = _limit(first) or device.available
    device = dataclasses.replace(device, flops=peak.flops, available=available)
    if device.torus:
        return _slices(device, devices)
    nodes = len(set(hosts)) or 1
    each, rest = divmod(len(devices), nodes)
    if rest:
        raise ValueError(f"{len(devices)} devices are not spread evenly on {nodes}")
    return Target(f"{device.name}:{nodes}x{each}", device, (each,), nodes)


def published_target(devices: Sequence[Any]) -> Target:
    """As `target_here`, by published figures alone: the same in all processes.

    A ValueError says why there are none.
    """
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(f"the devices differ: {', '.join(kinds)}")
    device = planned_device(kinds[0])
    if device is None:
        raise ValueError(f"the figures of {kinds[0]} are not known")
    if device.torus:
        return _slices(device, devices)
    # Devices of one node, as far as jax knows; otherwise those of one process.
    node = [getattr(d, "slice_index", None) for d in devices]
    nodes = len(set(node if None not in node else [d.process_index for d in devices]))
    each, rest = divmod(len(devices), nodes)
    if rest:
        raise ValueError(f"{len(devices)} devices are not spread evenly on {nodes}")
    return Target(f"{device.name}:{nodes}x{each}", device, (each,), nodes)


def _cpu(devices: Sequence[Any], dtype: str) -> Target:
    if len({device.process_index for device in devices}) > 1:
        raise ValueError("how CPU processes share cores and network is not known")
    num, peak = len(devices), peak_flops(devices[0], dtype)
    assert peak is not None
    bandwidth = measure_bandwidth()
    device = Device(
        name=CPU,
        flops=peak.flops / num,
        hbm=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / num,
        hbm_bandwidth=bandwidth / num,
        # To send is to read and to write in the memory that all share.
        link=bandwidth / 2 / num,
        network=bandwidth / 2 / num,
        source="measured here",
    )
    return Target(f"{CPU}:1x{num}", device, (num,))


def _slices(device: Device, devices: Sequence[Any]) -> Target:
    """The shape of a slice is that of the chips' coordinates in it."""
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
        raise ValueError(f"{len(devices)} {device.name} devices are no whole slices")
    shape = shape[: device.torus]
    many = f"{len(slices)}x" if len(slices) > 1 else ""
    name = f"{many}{device.name}:{'x'.join(map(str, shape))}"
    return Target(name, device, shape, len(slices))


def _limit(device: Any) -> float | None:
    """What programs may use of its memory, where the device says it."""
    return (device.memory_stats() or {}).get("bytes_limit")
