"""Specifications of devices and their networks: one table, with sources.

A target names devices that need not be attached to this machine:

  v5p-128          a TPU slice; v4 and v5p count TensorCores (64 chips), v5e and v6e
                   count chips
  v5e:4x4          a TPU slice by the shape of its torus, in chips
  2xv5p-128        slices connected by the data center network (DCN)
  h100:8x8         nodes x GPUs per node
  own:8x8,flops=4e14,hbm=64e9,hbm_bandwidth=2e12,link=2e11,network=2.5e10
"""

import dataclasses
import math
import re
from typing import Any

_GIB = 2**30
CPU = "cpu"  # a device with this name is one of those that share a machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device as jax sees it. Bandwidths are in bytes per second, one direction.

    Attributes:
      flops: dense bfloat16 FLOP/s.
      link: bandwidth of one link to a neighbor; for a GPU, of all links to the switch.
      torus: dimensions of the torus that connects chips; 0 if a switch connects them.
      wraps: a torus dimension of this size, or a multiple of it, closes to a ring.
      available: bytes of hbm that programs may use; None if all of it, as far as known.
      cores: cores per chip, as counted by a name such as v5p-128.
      network: bandwidth per device between slices or nodes.
      workspace: bytes that XLA allocates for a cuBLAS matmul (read from its programs).
      source: where the numbers are published.
    """

    name: str
    flops: float
    hbm: float
    hbm_bandwidth: float
    link: float
    network: float
    torus: int = 0
    wraps: int = 0
    available: float | None = None
    cores: int = 1
    workspace: float = 0
    source: str = "the user"

    @property
    def platform(self) -> str:
        """The jax platform, on which a model's choice of attention kernel depends."""
        return "tpu" if self.torus else "cpu" if self.name == CPU else "gpu"

    @property
    def usable(self) -> float:
        return self.hbm if self.available is None else self.available

    def __post_init__(self):
        for name in ("flops", "hbm", "hbm_bandwidth", "link", "network"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"device {self.name!r}: {name} is {getattr(self, name)!r}; "
                    "expected a number > 0, in FLOP/s, bytes or bytes per second"
                )


# cloud.google.com/tpu/docs has a page for each version: peak, HBM, the bidirectional
# bandwidth of a chip's links from v5e on, and the DCN bandwidth of v5p. The links of v4
# and the other DCN bandwidths are from jax-ml.github.io/scaling-book/tpus, "TPU specs".
# The pages give HBM in GiB or GB; memory comes in powers of two, so both mean GiB here.
_TPU = "cloud.google.com/tpu/docs/{}; jax-ml.github.io/scaling-book/tpus"
# `available` is from the compiler's out-of-memory errors (libtpu 0.0.51: "exceeds
# available HBM (15.75G)").
# nvidia.com/data-center, data sheets of H100 SXM and A100 80GB SXM. Links: NVLink's 900
# and 600 GB/s are bidirectional. Network: one 400 or 200 Gb/s adapter per GPU, as in
# DGX H100 and DGX A100.
_GPU = "nvidia.com/data-center, data sheets of {0} SXM and DGX {0}"

DEVICES = {
    device.name: device
    for device in (
        Device(
            name="v4",
            flops=275e12,
            hbm=32 * _GIB,
            available=30.75 * _GIB,
            hbm_bandwidth=1200e9,
            link=45e9,
            network=6.25e9,
            torus=3,
            wraps=4,
            cores=2,
            source=_TPU.format("v4"),
        ),
        Device(
            name="v5e",
            flops=197e12,
            hbm=16 * _GIB,
            available=15.75 * _GIB,
            hbm_bandwidth=819e9,
            link=400e9 / 8,
            network=3.125e9,
            torus=2,
            wraps=16,
            source=_TPU.format("v5e"),
        ),
        Device(
            name="v5p",
            flops=459e12,
            hbm=95 * _GIB,
            available=95.73 * _GIB,
            hbm_bandwidth=2765e9,
            link=1200e9 / 12,
            network=50e9 / 8,
            torus=3,
            wraps=4,
            cores=2,
            source=_TPU.format("v5p"),
        ),
        Device(
            name="v6e",
            flops=918e12,
            hbm=32 * _GIB,
            available=31.24 * _GIB,
            hbm_bandwidth=1638e9,
            link=800e9 / 8,
            network=12.5e9,
            torus=2,
            wraps=16,
            source=_TPU.format("v6e"),
        ),
        Device(
            name="h100",
            flops=989.5e12,
            hbm=80e9,
            hbm_bandwidth=3.35e12,
            link=450e9,
            network=400e9 / 8,
            workspace=32 * 2**20,
            source=_GPU.format("H100"),
        ),
        Device(
            name="a100",
            flops=312e12,
            hbm=80e9,
            hbm_bandwidth=2.039e12,
            link=300e9,
            network=200e9 / 8,
            workspace=4 * 2**20,
            source=_GPU.format("A100"),
        ),
    )
}

# The standard shape of a slice for each number of chips, from the same pages.
_SHAPES = {
    2: ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"],
    3: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16".split()
    + ["16x16x24"],
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices and how they are connected.

    Attributes:
      shape: of the torus of one slice, in chips; for GPUs, (devices per node,).
      num_slices: slices or nodes, connected by the slower network.
    """

    name: str
    device: Device
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def num_devices(self) -> int:
        return self.num_slices * math.prod(self.shape)

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Whether each of three dimensions closes to a ring.

        By default the compiler assumes that none does, and generates slower programs:
        on v5p, all-reduces instead of all-gathers.
        """
        wraps = self.device.wraps
        rings = [bool(wraps) and size % wraps == 0 for size in self.shape]
        if self.device.torus == 3:
            # Slices consist of cubes, connected to rings in all dimensions or in none.
            rings = [all(rings)] * 3
        return (*rings, False, False, False)[:3]


def parse_target(text: str) -> Target:
    """Parses a target; see the module docstring for the syntax."""
    name, _, rest = text.partition(":")
    if rest and name == "own":
        return _own(text, *rest.split(","))
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z]\w+)[-:]([\dx]+)", text)
    if not match or match[2] not in DEVICES:
        raise ValueError(
            f"target {text!r} is unknown. Devices: {', '.join(DEVICES)}. Write it as "
            "v5p-128, v5e:4x4, 2xv5p-128, h100:8x8 (nodes x GPUs), or specify it: "
            "own:8x8,flops=4e14,hbm=64e9,hbm_bandwidth=2e12,link=2e11,network=2.5e10"
        )
    device, num_slices = DEVICES[match[2]], int(match[1] or 1)
    if not device.torus:
        nodes, each = _parse_shape(text, match[3], 2)
        return Target(text, device, (each,), num_slices * nodes)
    if f":{match[3]}" in text:
        return Target(
            text, device, _parse_shape(text, match[3], device.torus), num_slices
        )
    shapes = [tuple(map(int, s.split("x"))) for s in _SHAPES[device.torus]]
    named = {math.prod(shape) * device.cores: shape for shape in shapes}
    if not match[3].isdigit() or int(match[3]) not in named:
        what = "TensorCores" if device.cores > 1 else "chips"
        raise ValueError(
            f"target {text!r}: no standard slice of {device.name} has {match[3]} "
            f"{what}; expected one of {', '.join(map(str, named))}, or a shape such as "
            f"{device.name}:{_SHAPES[device.torus][4]}."
        )
    return Target(text, device, named[int(match[3])], num_slices)


def sizes_of(target: Target, most: int = 4096) -> list[Target]:
    """Returns the standard sizes of a target, in increasing order.

    For TPUs these are the standard slices, then 2, 4, ... of the largest slice. For
    GPUs they are the divisors of a node, then 2, 4, ... nodes.

    Args:
      most: devices of the largest size.
    """
    device = target.device
    if device.torus:
        shapes = [tuple(map(int, s.split("x"))) for s in _SHAPES[device.torus]]
        sizes = [_resize(target, shape, 1) for shape in shapes]
    else:
        (node,) = target.shape
        sizes = [_resize(target, (n,), 1) for n in range(1, node + 1) if not node % n]
    largest = sizes[-1].shape
    num = 2
    while num * math.prod(largest) <= most:
        sizes.append(_resize(target, largest, num))
        num *= 2
    return [size for size in sizes if size.num_devices <= most]


def _resize(target: Target, shape: tuple[int, ...], num: int) -> Target:
    """Returns a target with another number of the same devices."""
    device = target.device
    if not device.torus:
        _, _, settings = target.name.partition(",")
        more = f",{settings}" if settings else ""
        name = f"{device.name}:{num}x{shape[0]}{more}"
    else:
        name = f"{device.name}-{math.prod(shape) * device.cores}"
        name = name if num == 1 else f"{num}x{name}"
    return Target(name, device, shape, num)


def _parse_shape(text: str, shape: str, num: int) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in shape.split("x") if size)
    if len(sizes) != num or min(sizes) < 1:
        raise ValueError(
            f"target {text!r}: {shape!r} must be {num} numbers > 0 joined by x"
        )
    return sizes


def _own(text: str, shape: str, *settings: str) -> Target:
    nodes, each = _parse_shape(text, shape, 2)
    names = [f.name for f in dataclasses.fields(Device)][1:6]
    parts = [setting.partition("=") for setting in settings]
    values = {name: value for name, _, value in parts}
    if sorted(values) != sorted(names):
        raise ValueError(
            f"target {text!r}: it specifies {', '.join(values) or 'no numbers'}; a "
            f"custom device needs {', '.join(names)}, each once"
        )
    try:
        numbers: dict[str, Any] = {name: float(value) for name, value in values.items()}
    except ValueError as error:
        raise ValueError(
            f"target {text!r}: {error}; write numbers such as 4e14"
        ) from None
    return Target(text, Device(name="own", **numbers), (each,), nodes)
