"""What a device can do and how devices are joined: one table, each number sourced.

A target names devices that need not be here:

  v5p-128          a TPU slice; v4 and v5p count TensorCores (64 chips), v5e, v6e chips
  v5e:4x4          the same by the shape of its torus, in chips
  2xv5p-128        slices joined by the data center network (DCN)
  h100:8x8         nodes x GPUs of a node
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
    """One device as jax sees it. Bandwidths are bytes a second, in one direction.

    Attributes:
      flops: dense bfloat16 FLOP/s.
      link: of one link to a neighbour; of a GPU, of all its links to the switch.
      torus: dimensions of the torus that joins chips; 0 where a switch joins devices.
      wraps: the size of a torus dimension, and its multiples, that close to a ring.
      available: of hbm, what programs may use; None where that is not known to be less.
      cores: what a name such as v5p-128 counts for each chip.
      network: a device's share of what joins slices or nodes.
      workspace: bytes that XLA gives a product by cuBLAS (read off its programs).
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
        """As models know it: what attention may be computed by."""
        return "tpu" if self.torus else "cpu" if self.name == CPU else "gpu"

    @property
    def usable(self) -> float:
        return self.hbm if self.available is None else self.available

    def __post_init__(self):
        for name in ("flops", "hbm", "hbm_bandwidth", "link", "network"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"device {self.name!r}: {name} is {getattr(self, name)!r}; "
                    "expected a number above 0, in FLOP/s, bytes or bytes a second"
                )


# cloud.google.com/tpu/docs has a page for each version: peak, HBM and, from v5e on, the
# bandwidth of a chip's links both ways together, and of v5p the DCN. Of v4 links, and
# DCN elsewhere: jax-ml.github.io/scaling-book/tpus, "TPU specs". HBM is what the
# page calls GiB or GB; memory is made in powers of two, so both are taken as GiB.
_TPU = "cloud.google.com/tpu/docs/{}; jax-ml.github.io/scaling-book/tpus"
# What programs may use of it is in the compiler's own words, where it refuses one for
# want of memory (libtpu 0.0.51: "exceeds available HBM (15.75G)").
# nvidia.com/data-center, data sheets of H100 SXM and A100 80GB SXM. Links: NVLink's 900
# and 600 GB/s are both ways together. Network: one 400 or 200 Gb/s adapter for each
# GPU, as in DGX H100 and DGX A100.
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

# The usual shape of a slice for its number of chips, from the same pages.
_SHAPES = {
    2: ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"],
    3: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16".split()
    + ["16x16x24"],
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices and how they are joined.

    Attributes:
      shape: of the torus of one slice in chips; of GPUs, (devices of a node,).
      num_slices: slices or nodes, joined by the slower network.
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
        """For each of three dimensions, whether it closes to a ring.

        The compiler takes a slice for one without rings unless it is told, and then
        makes slower programs: on v5p, all-reduces where it would gather.
        """
        wraps = self.device.wraps
        rings = [bool(wraps) and size % wraps == 0 for size in self.shape]
        if self.device.torus == 3:
            # Made of cubes, which are joined to rings in all dimensions or in none.
            rings = [all(rings)] * 3
        return (*rings, False, False, False)[:3]


def parse_target(text: str) -> Target:
    """The target of a name; see the top of this file."""
    name, _, rest = text.partition(":")
    if rest and name == "own":
        return _own(text, *rest.split(","))
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z]\w+)[-:]([\dx]+)", text)
    if not found or found[2] not in DEVICES:
        raise ValueError(
            f"target {text!r} is unknown. Devices: {', '.join(DEVICES)}. Write it as "
            "v5p-128, v5e:4x4, 2xv5p-128, h100:8x8 (nodes x GPUs), or give numbers: "
            "own:8x8,flops=4e14,hbm=64e9,hbm_bandwidth=2e12,link=2e11,network=2.5e10"
        )
    device, num_slices = DEVICES[found[2]], int(found[1] or 1)
    if not device.torus:
        nodes, each = _sizes(text, found[3], 2)
        return Target(text, device, (each,), num_slices * nodes)
    if f":{found[3]}" in text:
        return Target(text, device, _sizes(text, found[3], device.torus), num_slices)
    shapes = [tuple(map(int, s.split("x"))) for s in _SHAPES[device.torus]]
    named = {math.prod(shape) * device.cores: shape for shape in shapes}
    if not found[3].isdigit() or int(found[3]) not in named:
        what = "TensorCores" if device.cores > 1 else "chips"
        raise ValueError(
            f"target {text!r}: no usual slice of {device.name} has {found[3]} {what}; "
            f"there are {', '.join(map(str, named))}. Or give its shape, such as "
            f"{device.name}:{_SHAPES[device.torus][4]}."
        )
    return Target(text, device, named[int(found[3])], num_slices)


def sizes_of(target: Target, most: int = 4096) -> list[Target]:
    """The usual numbers of a target's devices, small ones first.

    Of TPUs the usual slices, then several of the largest, twice as many each time. Of
    GPUs parts of a node, one node, then twice as many each time.
    """
    device, found = target.device, []
    if device.torus:
        shapes = [tuple(map(int, s.split("x"))) for s in _SHAPES[device.torus]]
        found = [_sized(target, shape, 1) for shape in shapes]
    else:
        (node,) = target.shape
        found = [_sized(target, (n,), 1) for n in range(1, node + 1) if not node % n]
    whole = found[-1].shape
    num = 2
    while num * math.prod(whole) <= most:
        found.append(_sized(target, whole, num))
        num *= 2
    return [size for size in found if size.num_devices <= most]


def _sized(target: Target, shape: tuple[int, ...], num: int) -> Target:
    """A target of the same devices in another number, by its name."""
    device = target.device
    if not device.torus:
        _, _, settings = target.name.partition(",")
        more = f",{settings}" if settings else ""
        name = f"{device.name}:{num}x{shape[0]}{more}"
    else:
        name = f"{device.name}-{math.prod(shape) * device.cores}"
        name = name if num == 1 else f"{num}x{name}"
    return Target(name, device, shape, num)


def _sizes(text: str, words: str, num: int) -> tuple[int, ...]:
    sizes = tuple(int(word) for word in words.split("x") if word)
    if len(sizes) != num or min(sizes) < 1:
        raise ValueError(
            f"target {text!r}: {words!r} must be {num} numbers above 0 joined by x"
        )
    return sizes


def _own(text: str, words: str, *settings: str) -> Target:
    nodes, each = _sizes(text, words, 2)
    names = [f.name for f in dataclasses.fields(Device)][1:6]
    parts = [setting.partition("=") for setting in settings]
    given = {name: value for name, _, value in parts}
    if sorted(given) != sorted(names):
        raise ValueError(
            f"target {text!r}: it gives {', '.join(given) or 'no numbers'}; a "
            f"device of one's own needs {', '.join(names)}, each once"
        )
    try:
        numbers: dict[str, Any] = {name: float(value) for name, value in given.items()}
    except ValueError as error:
        raise ValueError(f"target {text!r}: {error}; write 4e14") from None
    return Target(text, Device(name="own", **numbers), (each,), nodes)
