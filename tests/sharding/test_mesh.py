import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from meshloom.sharding import MeshSpec
from meshloom.sharding.mesh import AXES, mesh_sizes


@dataclasses.dataclass(frozen=True)
class Device:
    """A fake device with the attributes that mesh_utils reads."""

    id: int
    process_index: int = 0
    slice_index: int | None = None
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    platform: str = "gpu"
    device_kind: str = "imaginary"


def error(call) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def test_every_axis_exists_in_order_and_is_auto():
    mesh = MeshSpec(data=2, fsdp=2, tensor=2).make()
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == (1, 1, 2, 2, 1, 1, 2)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sorted(d.id for d in mesh.devices.flat) == list(range(8))


def test_one_axis_takes_the_remaining_devices():
    assert MeshSpec(data=2, fsdp=-1).sizes(8)["fsdp"] == 4
    assert mesh_sizes(MeshSpec(tensor=-1).make(jax.devices()[:4]))["tensor"] == 4


def test_sizes_that_do_not_match_the_devices_are_an_error():
    assert error(lambda: MeshSpec(data=3, tensor=2).make()) == (
        "mesh data=3,tensor=2 needs 6 devices, but there are 8. Change the axis sizes, "
        "or set one axis to -1."
    )
    assert error(lambda: MeshSpec(data=-1, tensor=3).make()) == (
        "mesh data=-1,tensor=3 needs a multiple of 3 devices, but there are 8. Change "
        "the axis sizes, or set one axis to -1."
    )
    assert "mesh one device needs 1 devices" in error(lambda: MeshSpec().make())


def test_bad_sizes_are_errors():
    for size in (0, -2, 2.0, "2", True):
        assert error(lambda size=size: MeshSpec(data=size)) == (  # pyright: ignore
            "mesh axis 'data' must be a positive integer, or -1 for the remaining "
            f"devices, got {size!r}"
        )
    assert error(lambda: MeshSpec(data=-1, tensor=-1)) == (
        "mesh data=-1,tensor=-1: only one axis may be -1, got ['data', 'tensor']. Set "
        "the sizes of the others."
    )


def test_parse_reads_what_str_writes():
    for text in ("data=2,fsdp=-1,tensor=4", "data=8/2,tensor=2"):
        assert str(MeshSpec.parse(text)) == text
    spec = MeshSpec.parse(" data = 8/2 , tensor=2,")
    assert spec == MeshSpec(data=8, tensor=2, dcn={"data": 2})
    assert str(MeshSpec()) == "one device"


def test_parse_refuses_bad_text():
    assert error(lambda: MeshSpec.parse("model=2")) == (
        "mesh 'model=2': 'model' is not a mesh axis. Axes: replica, pipe, data, fsdp, "
        "expert, context, tensor."
    )
    assert error(lambda: MeshSpec.parse("data=2,data=4")) == (
        "mesh 'data=2,data=4': axis 'data' is given twice"
    )
    for value in ("two", "", "8/", "8/x"):
        assert error(lambda value=value: MeshSpec.parse(f"data={value}")) == (
            f"mesh 'data={value}': the size of 'data' must be an integer, got "
            f"{value!r}. Write data=4, or data=-1 for the remaining devices."
        )


def test_abstract_needs_no_devices():
    mesh = MeshSpec(fsdp=64, tensor=4).abstract()
    assert mesh.size == 256
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh_sizes(MeshSpec(fsdp=-1).abstract(512))["fsdp"] == 512
    assert error(lambda: MeshSpec(fsdp=-1).abstract()) == (
        "mesh fsdp=-1 has an axis of size -1, but num_devices is not given. Set "
        "the size, or pass num_devices."
    )


def test_dcn_is_checked_without_devices():
    assert error(lambda: MeshSpec(data=4, dcn={"model": 2})) == (
        "mesh dcn names 'model', which is not a mesh axis. Axes: replica, pipe, data, "
        "fsdp, expert, context, tensor."
    )
    for slices in (3, 0):
        assert error(lambda s=slices: MeshSpec(data=4, dcn={"data": s})) == (
            f"mesh axis 'data' of size 4 cannot be split over {slices} slices; dcn "
            "must be a positive integer that divides the axis size"
        )


def grid(spec: MeshSpec, devices) -> np.ndarray:
    """Returns device ids along data and tensor. Mesh accepts any object as a device."""
    ids = np.vectorize(lambda d: d.id)(spec.make(devices).devices)
    return ids.reshape(spec.sizes(len(devices))["data"], -1)


def test_slices_become_the_outer_part_of_the_axis():
    # The list interleaves the slices; the mesh must group them.
    devices = [Device(i, slice_index=i % 2) for i in range(8)]
    ids = grid(MeshSpec(data=4, tensor=2, dcn={"data": 2}), devices)
    slices = ids % 2
    # data = (slice, index inside the slice); tensor never crosses slices.
    np.testing.assert_array_equal(slices, [[0, 0], [0, 0], [1, 1], [1, 1]])


def test_a_free_axis_may_cross_slices():
    devices = [Device(i, slice_index=i // 4) for i in range(8)]
    ids = grid(MeshSpec(data=-1, tensor=2, dcn={"data": 2}), devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(4, 2))
    spec = MeshSpec(data=-1, tensor=8, dcn={"data": 2})
    assert error(lambda: spec.make(devices)) == (
        "mesh axis 'data' of size 1 cannot be split over 2 slices; dcn must be a "
        "positive integer that divides the axis size"
    )


def test_without_slices_dcn_splits_over_processes():
    devices = [Device(i, process_index=i % 4) for i in range(8)]
    ids = grid(MeshSpec(data=4, tensor=2, dcn={"data": 4}), devices)
    np.testing.assert_array_equal(ids % 4, [[0, 0], [1, 1], [2, 2], [3, 3]])


def test_one_process_cannot_be_split():
    # CPU devices have no slice, and all of these belong to process 0.
    assert error(lambda: MeshSpec(data=8, dcn={"data": 2}).make()) == (
        "mesh data=8/2 is split over 2 processes by dcn, but its 8 devices are in "
        "1. The sizes in dcn must multiply to 1."
    )
    assert MeshSpec(data=8, dcn={"data": 1}).make() == MeshSpec(data=8).make()


def test_wrong_or_unequal_slices_are_errors():
    devices = [Device(i, slice_index=i // 2) for i in range(8)]
    assert error(lambda: MeshSpec(data=8, dcn={"data": 2}).make(devices)) == (
        "mesh data=8/2 is split over 2 slices by dcn, but its 8 devices are in 4. "
        "The sizes in dcn must multiply to 4."
    )
    devices = [Device(i, slice_index=int(i > 2)) for i in range(8)]
    assert error(lambda: MeshSpec(data=8, dcn={"data": 2}).make(devices)) == (
        "mesh data=8/2: its slices have [3, 5] devices, but dcn needs the same number "
        "in each. Leave out the surplus devices."
    )


def tpus(num_slices: int) -> list[Device]:
    """Returns slices of 2x2 chips, with ids that run along y."""
    return [
        Device(4 * s + 2 * x + y, s, s, (x, y, 0), 0, "tpu", "TPU v5 lite")
        for s in range(num_slices)
        for y in range(2)
        for x in range(2)
    ]


def test_tensor_neighbors_on_tpus_are_one_link_apart():
    spec = MeshSpec(data=4, tensor=2, dcn={"data": 2})
    mesh = spec.make(tpus(2))
    pairs = mesh.devices.reshape(-1, 2)
    assert [d.slice_index for d in pairs[:, 0]] == [0, 0, 1, 1]
    for a, b in pairs:  # tensor neighbors: in one slice, one link apart
        assert a.slice_index == b.slice_index
        assert math.dist(a.coords, b.coords) == 1
    assert error(lambda: MeshSpec(data=4, tensor=2).make(tpus(2))) == (
        "mesh data=4,tensor=2: its devices are in 2 slices, but no axis is declared "
        "to cross them. Write for instance data=-1/2, or dcn={'data': 2}."
    )
    assert MeshSpec(data=2, tensor=2).make(tpus(1)).size == 4
