"""Tests of target names and the table of devices."""

import pytest

from meshloom.trainer.program.hardware import DEVICES, Device, parse_target


@pytest.mark.parametrize(
    ("name", "shape", "slices", "devices"),
    [
        ("v5p-128", (4, 4, 4), 1, 64),  # names of v4 and v5p count TensorCores
        ("v4-16", (2, 2, 2), 1, 8),
        ("v5e-256", (16, 16), 1, 256),  # names of v5e and v6e count chips
        ("v6e-8", (2, 4), 1, 8),
        ("v5e:4x4", (4, 4), 1, 16),
        ("2xv5p-128", (4, 4, 4), 2, 128),
        ("3xv5e:2x2", (2, 2), 3, 12),
        ("h100:8x8", (8,), 8, 64),
        ("a100:1x16", (16,), 1, 16),
    ],
)
def test_targets(name, shape, slices, devices):
    target = parse_target(name)
    assert (target.shape, target.num_slices) == (shape, slices)
    assert target.num_devices == devices
    assert target.device is DEVICES[target.device.name]


def test_a_device_of_ones_own():
    numbers = "flops=4e14,hbm=64e9,hbm_bandwidth=2e12,link=2e11,network=2.5e10"
    target = parse_target(f"own:2x4,{numbers}")
    assert target.num_devices == 8 and target.device.hbm == 64e9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v7-8", "target 'v7-8' is unknown. Devices: v4, v5e"),
        ("v5p", "target 'v5p' is unknown"),
        (
            "v5p-100",
            "no standard slice of v5p has 100 TensorCores; expected one of 8, 16",
        ),
        ("v5e-12", "no standard slice of v5e has 12 chips; expected one of 1, 4"),
        ("v5p:4x4", "'4x4' must be 3 numbers > 0 joined by x"),
        ("h100:8", "'8' must be 2 numbers"),
        ("v5e:0x4", "'0x4' must be 2 numbers > 0"),
        (
            "own:1x8,flops=1e14",
            "it specifies flops; a custom device needs flops, hbm",
        ),
        (
            "own:1x8,flops=a,hbm=1,hbm_bandwidth=1,link=1,network=1",
            "could not convert string to float: 'a'; write numbers such as 4e14",
        ),
        (
            "own:1x8,flops=0,hbm=1,hbm_bandwidth=1,link=1,network=1",
            "device 'own': flops is 0.0; expected a number > 0",
        ),
    ],
)
def test_invalid_targets(name, message):
    with pytest.raises(ValueError, match=message):
        parse_target(name)


def test_every_number_has_a_source():
    for device in DEVICES.values():
        assert "." in device.source, device.name
    assert Device(name="x", flops=1, hbm=1, hbm_bandwidth=1, link=1, network=1)


@pytest.mark.parametrize(
    ("name", "rings"),
    [
        ("v5p-128", (True, True, True)),
        ("v5p-64", (False, False, False)),  # 2x4x4 does not consist of cubes of 4x4x4
        ("v5e:8x16", (False, True, False)),
        ("v5e-256", (True, True, False)),
        ("h100:8x8", (False, False, False)),
    ],
)
def test_dimensions_that_close_to_rings(name, rings):
    assert parse_target(name).wrap == rings
