"""The network is measured along every axis, and a slow axis is reported."""

import json

import jax
import pytest
from rich.console import Console

from meshloom.sharding import MeshSpec
from meshloom.trainer.job import network_probe
from meshloom.trainer.job.group import Group
from meshloom.trainer.record import run_folder


@pytest.fixture(scope="module")
def mesh():
    return MeshSpec(data=2, tensor=4).make()


@pytest.fixture(scope="module")
def figures(mesh):
    return network_probe.measure(mesh, Group())


def test_every_axis_operation_and_size_is_measured(figures):
    found = [(f.axis, f.size, f.operation, f.bytes) for f in figures]
    assert found == [
        (axis, size, operation, count)
        for axis, size in (("data", 2), ("tensor", 4))
        for operation in network_probe.OPERATIONS
        for count in network_probe.CPU_SIZES
    ]
    assert all(f.seconds > 0 and f.bandwidth > 0 for f in figures)
    assert {f.processes for f in figures} == {1}


@pytest.mark.parametrize("axis", ["data", "tensor"])
@pytest.mark.parametrize(
    "operation, name", [("all-reduce", "all-reduce"), ("permute", "collective-permute")]
)
def test_the_operation_is_in_the_program(mesh, axis, operation, name):
    x = network_probe._input(mesh, 4096)
    assert {shard.data.nbytes for shard in x.addressable_shards} == {4096}
    program = network_probe._compile(mesh, axis, operation, x, 2)
    assert f" {name}(" in program.as_text()
    assert jax.numpy.array_equal(program(x), x)


def figure(axis="data", operation="all-reduce", seconds=1.0, processes=1):
    return network_probe.Figure(axis, 4, processes, operation, 1000, seconds)


def test_bandwidth_is_what_a_device_sends():
    assert figure().bandwidth == 1500
    assert figure(operation="permute").bandwidth == 1000


def test_a_slow_axis_is_reported():
    quick = figure("tensor", seconds=0.1)
    assert network_probe.slow_axes([]) == []
    assert network_probe.slow_axes([quick, figure(seconds=0.39)]) == []
    (sentence,) = network_probe.slow_axes([quick, figure(seconds=0.5)])
    assert sentence == (
        "Axis data moves 2.9 KiB/s, 5 times less than tensor with 14.6 KiB/s. Check "
        "the links between its devices."
    )
    (sentence,) = network_probe.slow_axes([quick, figure(seconds=0.5, processes=2)])
    assert "It spans 2 processes, the fastest axis 1: put the axis" in sentence
    # The size with the best bandwidth counts.
    assert (
        network_probe.slow_axes([quick, figure(seconds=0.5), figure(seconds=0.1)]) == []
    )


def test_figures_are_printed_and_written_once(mesh, tmp_path, monkeypatch):
    calls = []

    def measure(mesh, group):
        calls.append(mesh)
        return [figure("tensor", seconds=0.1), figure(seconds=0.5)]

    monkeypatch.setattr(network_probe, "measure", measure)
    folder = run_folder.RunFolder(tmp_path)

    def run(hosts):
        console = Console(width=200, highlight=False)
        with console.capture() as shown:
            network_probe.run(mesh, Group(), folder, hosts, console)
        return shown.get()

    shown = run(["a", "b"])
    line = ["tensor=4", "all-reduce", "1000", "B", "100,000", "us", "14.6", "KiB/s"]
    assert line in [row.split() for row in shown.splitlines()]
    assert "Axis data moves" in shown
    kept = json.loads((tmp_path / "network.json").read_text())
    assert kept["mesh"] == {"data": 2, "tensor": 4} and len(kept["slow"]) == 1
    assert kept["figures"][0]["bytes_per_second"] == 15000
    assert run(["a", "b"]) == "" and len(calls) == 1
    assert "Axis data moves" in run(["a", "c"]) and len(calls) == 2
