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
    """What mesh_utils reads of a device, for machines that are not here."""

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


def test_every_axis_is_there_in_order_and_automatic():
    mesh = MeshSpec(data=2, fsdp=2, tensor=2).make()
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == (1, 1, 2, 2, 1, 1, 2)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sorted(d.id for d in mesh.devices.flat) == list(range(8))


def test_one_axis_takes_the_devices_left_over():
    assert MeshSpec(data=2, fsdp=-1).sizes(8)["fsdp"] == 4
    assert mesh_sizes(MeshSpec(tensor=-1).make(jax.devices()[:4]))["tensor"] == 4


def test_sizes_that_do_not_fit_the_devices():
    assert error(lambda: MeshSpec(data=3, tensor=2).make()) == (
        "mesh data=3,tensor=2 needs 6 devices, but there are 8. Change the axis sizes, "
        "or give one axis size -1."
    )
    assert error(lambda: MeshSpec(data=-1, tensor=3).make()) == (
        "mesh data=-1,tensor=3 needs a multiple of 3 devices, but there are 8. Change "
        "the axis sizes, or give one axis size -1."
    )
    assert "mesh one device needs 1 devices" in error(lambda: MeshSpec().make())


def test_bad_sizes():
    for size in (0, -2, 2.0, "2", True):
        assert error(lambda size=size: MeshSpec(data=size)) == (  # pyright: ignore
            f"mesh axis 'data' has size {size!r}; give a positive whole number, or -1 "
            "for the devices left over"
        )
    assert error(lambda: MeshSpec(data=-1, tensor=-1)) == (
        "mesh data=-1,tensor=-1: only one axis may be -1, got ['data', 'tensor']. Give "
        "the others their sizes."
    )


def test_parse_reads_what_str_writes():
    for text in ("data=2,fsdp=-1,tensor=4", "data=8/2,tensor=2"):
        assert str(MeshSpec.parse(text)) == text
    spec = MeshSpec.parse(" data = 8/2 , tensor=2,")
    assert spec == MeshSpec(data=8, tensor=2, dcn={"data": 2})
    assert str(MeshSpec()) == "one device"


def test_parse_errors():
    assert error(lambda: MeshSpec.parse("model=2")) == (
        "mesh 'model=2': 'model' is no mesh axis. Axes: replica, pipe, data, fsdp, "
        "expert, context, tensor."
    )
    assert error(lambda: MeshSpec.parse("data=2,data=4")) == (
        "mesh 'data=2,data=4': axis 'data' is given twice"
    )
    for value in ("two", "", "8/", "8/x"):
        assert error(lambda value=value: MeshSpec.parse(f"data={value}")) == (
            f"mesh 'data={value}': the size of 'data' must be a whole number, got "
            f"{value!r}. Write it as data=4, or data=-1 for the rest."
        )


def test_abstract_needs_no_devices():
    mesh = MeshSpec(fsdp=64, tensor=4).abstract()
    assert mesh.size == 256
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh_sizes(MeshSpec(fsdp=-1).abstract(512))["fsdp"] == 512
    assert error(lambda: MeshSpec(fsdp=-1).abstract()) == (
        "mesh fsdp=-1 has an axis of size -1, and no number of devices was given to "
        "derive it from. Write its size."
    )


def test_dcn_is_checked_before_any_device_is_seen():
    assert error(lambda: MeshSpec(data=4, dcn={"model": 2})) == (
        "mesh dcn names 'model', which is no mesh axis. Axes: replica, pipe, data, "
        "fsdp, expert, context, tensor."
    )
    for slices in (3, 0):
        assert error(lambda s=slices: MeshSpec(data=4, dcn={"data": s})) == (
            f"mesh axis 'data' of size 4 cannot be split over {slices} slices; dcn "
            "must be a positive whole number that divides the axis"
        )


def grid(spec: MeshSpec, devices) -> np.ndarray:
    """Device ids along data and tensor. Mesh itself takes any object for a device."""
    ids = np.vectorize(lambda d: d.id)(spec.make(devices).devices)
    return ids.reshape(spec.sizes(len(devices))["data"], -1)


def test_slices_become_the_outer_part_of_the_axis():
    # Slices interleaved in the list: the mesh must group them, not follow the list.
    devices = [Device(i, slice_index=i % 2) for i in range(8)]
    ids = grid(MeshSpec(data=4, tensor=2, dcn={"data": 2}), devices)
    slices = ids % 2
    # data = (slice, way inside the slice); tensor never leaves a slice.
    np.testing.assert_array_equal(slices, [[0, 0], [0, 0], [1, 1], [1, 1]])


def test_a_free_axis_may_cross_slices():
    devices = [Device(i, slice_index=i // 4) for i in range(8)]
    ids = grid(MeshSpec(data=-1, tensor=2, dcn={"data": 2}), devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(4, 2))
    spec = MeshSpec(data=-1, tensor=8, dcn={"data": 2})
    assert error(lambda: spec.make(devices)) == (
        "mesh axis 'data' of size 1 cannot be split over 2 slices; dcn must be a "
        "positive whole number that divides the axis"
    )


def test_without_slices_processes_are_the_slower_network():
    devices = [Device(i, process_index=i % 4) for i in range(8)]
    ids = grid(MeshSpec(data=4, tensor=2, dcn={"data": 4}), devices)
    np.testing.assert_array_equal(ids % 4, [[0, 0], [1, 1], [2, 2], [3, 3]])


def test_one_process_cannot_be_split():
    # The CPU devices of this test have no slice, and all belong to process 0.
    assert error(lambda: MeshSpec(data=8, dcn={"data": 2}).make()) == (
        "mesh data=8/2 is split over 2 processes by its dcn part, but its 8 devices "
        "are in 1. Let the product of dcn be 1."
    )
    assert MeshSpec(data=8, dcn={"data": 1}).make() == MeshSpec(data=8).make()


def test_wrong_and_unequal_slices():
    devices = [Device(i, slice_index=i // 2) for i in range(8)]
    assert error(lambda: MeshSpec(data=8, dcn={"data": 2}).make(devices)) == (
        "mesh data=8/2 is split over 2 slices by its dcn part, but its 8 devices are "
        "in 4. Let the product of dcn be 4."
    )
    devices = [Device(i, slice_index=int(i > 2)) for i in range(8)]
    assert error(lambda: MeshSpec(data=8, dcn={"data": 2}).make(devices)) == (
        "mesh data=8/2: its slices hold [3, 5] devices, and a dcn part needs the same "
        "number in each. Leave out the larger ones' surplus devices."
    )


def tpus(num_slices: int) -> list[Device]:
    """Slices of 2x2 chips, the ids running along y."""
    return [
        Device(4 * s + 2 * x + y, s, s, (x, y, 0), 0, "tpu", "TPU v5 lite")
        for s in range(num_slices)
        for y in range(2)
        for x in range(2)
    ]


def test_tpu_slices():
    spec = MeshSpec(data=4, tensor=2, dcn={"data": 2})
    mesh = spec.make(tpus(2))
    pairs = mesh.devices.reshape(-1, 2)
    assert [d.slice_index for d in pairs[:, 0]] == [0, 0, 1, 1]
    for a, b in pairs:  # tensor neighbours: one slice, one link apart
        assert a.slice_index == b.slice_index
        assert math.dist(a.coords, b.coords) == 1
    assert error(lambda: MeshSpec(data=4, tensor=2).make(tpus(2))) == (
        "mesh data=4,tensor=2: its devices are in 2 slices, and no axis says that it "
        "crosses them. Give the axis its slice part, for instance data=-1/2, or "
        "dcn={'data': 2}."
    )
    assert MeshSpec(data=2, tensor=2).make(tpus(1)).size == 4
