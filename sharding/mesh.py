"""The mesh: named axes over devices, slowest network first."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

# replica: between slices or clusters; tensor: the fastest links.
AXES = ("replica", "pipe", "data", "fsdp", "expert", "context", "tensor")

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Sizes of the mesh axes. At most one may be -1: it takes the remaining devices.

    Axes of size 1 always exist and cost nothing, so rules need not check for them.

    Attributes:
      dcn: the factor of each axis that crosses the slower network between slices, for
        instance {"data": 2} for two data-parallel slices. Axis sizes are totals: data=8
        with dcn {"data": 2} is 4 ways inside each of 2 slices.
    """

    replica: int = 1
    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    dcn: Mapping[str, int] | None = None

    def __post_init__(self):
        for name in AXES:
            size = getattr(self, name)
            if not _is_count(size) and size != -1:
                raise ValueError(
                    f"mesh axis {name!r} must be a positive integer, or -1 for the "
                    f"remaining devices, got {size!r}"
                )
        free = [name for name in AXES if getattr(self, name) == -1]
        if len(free) > 1:
            raise ValueError(
                f"mesh {self}: only one axis may be -1, got {free}. Set the sizes of "
                "the others."
            )
        for name, size in (self.dcn or {}).items():
            if name not in AXES:
                raise ValueError(
                    f"mesh dcn names {name!r}, which is not a mesh axis. Axes: "
                    f"{', '.join(AXES)}."
                )
            self._check_split(name, getattr(self, name), size)

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Parses "data=2,fsdp=-1,tensor=4"; "data=8/2" sets dcn to {"data": 2}."""
        sizes: dict[str, int] = {}
        dcn: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = part.partition("=")
            total, slash, slices = value.partition("/")
            name = name.strip()
            if name not in AXES:
                raise ValueError(
                    f"mesh {text!r}: {name!r} is not a mesh axis. Axes: "
                    f"{', '.join(AXES)}."
                )
            if name in sizes:
                raise ValueError(f"mesh {text!r}: axis {name!r} is given twice")
            try:
                sizes[name] = int(total)
                if slash:
                    dcn[name] = int(slices)
            except ValueError:
                raise ValueError(
                    f"mesh {text!r}: the size of {name!r} must be an integer, got "
                    f"{value!r}. Write {name}=4, or {name}=-1 for the remaining "
                    "devices."
                ) from None
        return cls(**sizes, dcn=dcn or None)

    def __str__(self) -> str:
        dcn = {n: size for n, size in (self.dcn or {}).items() if size > 1}
        sizes = [
            f"{n}={getattr(self, n)}{f'/{dcn[n]}' if n in dcn else ''}"
            for n in AXES
            if getattr(self, n) != 1
        ]
        return ",".join(sizes) or "one device"

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Returns the size of every axis; they multiply to `num_devices`."""
        given = {name: getattr(self, name) for name in AXES}
        fixed = math.prod(size for size in given.values() if size != -1)
        free = -1 in given.values()
        if num_devices % fixed or (not free and fixed != num_devices):
            wanted = f"a multiple of {fixed}" if free else f"{fixed}"
            raise ValueError(
                f"mesh {self} needs {wanted} devices, but there are {num_devices}. "
                "Change the axis sizes, or set one axis to -1."
            )
        rest = num_devices // fixed
        return {n: rest if s == -1 else s for n, s in given.items()}

    def make(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Returns the mesh, with neighbors along an axis close on the network.

        Args:
          devices: default all devices. They may be compile-only devices of a topology.
        """
        devices = jax.devices() if devices is None else list(devices)
        sizes = self.sizes(len(devices))
        if not self.dcn:
            self._refuse_unplanned_slices(devices)
            grid = mesh_utils.create_device_mesh(
                tuple(sizes.values()), devices, allow_split_physical_axes=True
            )
        else:
            outer = {n: self.dcn.get(n, 1) for n in AXES}
            for name in AXES:  # an axis of -1 could not be checked before
                self._check_split(name, sizes[name], outer[name])
            by_process = _granule(devices) == "process_index"
            self._check_granules(devices, math.prod(outer.values()))
            grid = mesh_utils.create_hybrid_device_mesh(
                tuple(sizes[n] // outer[n] for n in AXES),
                tuple(outer.values()),
                devices,
                process_is_granule=by_process,
                allow_split_physical_axes=True,
            )
        # Auto is explicit here: jax defaults to Explicit, which restricts model code.
        return Mesh(np.asarray(grid), AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def _check_split(self, name: str, total: int, slices: int) -> None:
        if not _is_count(slices) or (total != -1 and total % slices):
            raise ValueError(
                f"mesh axis {name!r} of size {total} cannot be split over {slices!r} "
                "slices; dcn must be a positive integer that divides the axis size"
            )

    def _check_granules(self, devices: Sequence[Any], wanted: int) -> None:
        kind = _granule(devices)
        counts = collections.Counter(getattr(d, kind) for d in devices)
        what = "slices" if kind == "slice_index" else "processes"
        if len(counts) != wanted:
            raise ValueError(
                f"mesh {self} is split over {wanted} {what} by dcn, but its "
                f"{len(devices)} devices are in {len(counts)}. The sizes in dcn must "
                f"multiply to {len(counts)}."
            )
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"mesh {self}: its {what} have {list(counts.values())} devices, but "
                "dcn needs the same number in each. Leave out the surplus devices."
            )

    def _refuse_unplanned_slices(self, devices: Sequence[Any]) -> None:
        # On other platforms, devices with consecutive ids are close to each other.
        if devices[0].platform != "tpu":
            return
        slices = {getattr(device, "slice_index", 0) for device in devices}
        if len(slices) > 1:
            raise ValueError(
                f"mesh {self}: its devices are in {len(slices)} slices, but no axis is "
                f"declared to cross them. Write for instance data=-1/{len(slices)}, or "
                f"dcn={{'data': {len(slices)}}}."
            )

    def abstract(self, num_devices: int | None = None) -> AbstractMesh:
        """Returns the mesh without devices, for instance to resolve a larger one."""
        if num_devices is None:
            given = [getattr(self, n) for n in AXES]
            if -1 in given:
                raise ValueError(
                    f"mesh {self} has an axis of size -1, but num_devices is not "
                    "given. Set the size, or pass num_devices."
                )
            num_devices = math.prod(given)
        sizes = self.sizes(num_devices)
        return AbstractMesh(
            tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES)
        )


def _is_count(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def _granule(devices: Sequence[Any]) -> str:
    """Returns the device attribute that identifies a unit of the slower network."""
    # Without slices (GPU, CPU), the slower network connects processes.
    has_slices = getattr(devices[0], "slice_index", None) is not None
    return "slice_index" if has_slices else "process_index"


def mesh_sizes(mesh: Mesh | AbstractMesh | Sizes) -> dict[str, int]:
    """Returns the axis sizes of a mesh, an abstract mesh, or a mapping of sizes."""
    if isinstance(mesh, Mesh | AbstractMesh):
        return dict(mesh.shape)
    if isinstance(mesh, MeshSpec):
        raise ValueError(
            f"mesh {mesh} is a MeshSpec, not a mesh. Pass MeshSpec(...).make(), or "
            "MeshSpec(...).abstract() for a mesh without devices."
        )
    if not isinstance(mesh, Mapping):
        raise ValueError(
            f"expected a jax Mesh, an AbstractMesh or {{axis: size}}, got {mesh!r}"
        )
    return dict(mesh)


def refuse_explicit(mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError for a mesh on which sharding constraints do not work."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = [axis for axis, kind in types.items() if kind == AxisType.Explicit]
    if explicit:
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise ValueError(
            f"the mesh ({sizes}) has axes of type Explicit: {', '.join(explicit)}. "
            "That is the default of jax.make_mesh and jax.sharding.Mesh. A Sharder "
            "constrains arrays and leaves the rest to the compiler, which needs axes "
            "of type Auto: make the mesh with MeshSpec(...).make(), or pass axis_types="
            f"(jax.sharding.AxisType.Auto,) * {len(types)} when you make it."
        )
