"""Measures how fast the network is along each axis of the mesh, before training.

A cable in the wrong port, or a mesh that does not match the wiring, shows up here in
seconds instead of as a slow run. Figures are per device, while all groups of an axis
communicate at the same time, as they do in training.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from ...sharding.text import align, human_bytes
from ..record.run_folder import RunFolder
from .group import Group

FILE = "network.json"
KIB, MIB = 1024, 1024 * 1024
SIZES = (4 * KIB, MIB, 16 * MIB)  # bytes per device
CPU_SIZES = (4 * KIB, 64 * KIB, MIB)
# Collectives in one program, one after the other, and how often the program is run. The
# best time counts: other traffic on the network can only make it longer.
REPEATS, RUNS = 8, 3
CPU_REPEATS = 2
# An axis this many times slower than the fastest one is reported.
SLOW = 4.0
OPERATIONS = ("all-reduce", "permute")


@dataclasses.dataclass(frozen=True)
class Figure:
    """The measurement of one operation along one axis.

    Attributes:
      size: devices along the axis.
      processes: the most processes that one group of devices spans.
      bytes: bytes per device.
      seconds: time of one operation.
    """

    axis: str
    size: int
    processes: int
    operation: str
    bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a device sends, assuming an optimal algorithm."""
        ways = 2 * (self.size - 1) / self.size if self.operation == "all-reduce" else 1
        return self.bytes * ways / self.seconds

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"bytes_per_second": round(self.bandwidth)}


def measure(mesh: Mesh, group: Group) -> list[Figure]:
    """Measures every axis larger than 1. Every process must call this."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    sizes = CPU_SIZES if on_cpu else SIZES
    repeats = CPU_REPEATS if on_cpu else REPEATS
    axes = [name for name, size in mesh.shape.items() if size > 1]
    inputs = {size: _input(mesh, size) for size in sizes}
    programs = {
        (axis, operation, size): _compile(mesh, axis, operation, inputs[size], repeats)
        for axis in axes
        for operation in OPERATIONS
        for size in sizes
    }
    # Compile times differ between processes, and gloo waits at most 30 s.
    group.wait("probe")
    return [
        Figure(
            axis,
            mesh.shape[axis],
            _processes(mesh, axis),
            operation,
            size,
            _seconds(program, inputs[size]) / repeats,
        )
        for (axis, operation, size), program in programs.items()
    ]


def _input(mesh: Mesh, size: int) -> jax.Array:
    """Returns an array of which each device holds `size` bytes."""
    shape = (mesh.size, size // 4)
    row = np.ones((1, shape[1]), np.float32)
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(shape, sharding, lambda _: row)


def _compile(mesh: Mesh, axis: str, operation: str, x: jax.Array, repeats: int) -> Any:
    size = mesh.shape[axis]
    ring = [(i, (i + 1) % size) for i in range(size)]

    def once(_, shard: jax.Array) -> jax.Array:
        if operation == "all-reduce":
            return jax.lax.psum(shard, axis) * jnp.float32(1 / size)
        return jax.lax.ppermute(shard, axis, ring)

    spec = P(mesh.axis_names)
    program = jax.shard_map(
        functools.partial(jax.lax.fori_loop, 0, repeats, once),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,  # the output keeps the input's spec, also after a psum
    )
    return jax.jit(program).lower(x).compile()


def _seconds(program: Any, x: jax.Array) -> float:
    jax.block_until_ready(program(x))  # connects the groups
    best = float("inf")
    for _ in range(RUNS):
        began = time.perf_counter()
        jax.block_until_ready(program(x))
        best = min(best, time.perf_counter() - began)
    return best


def _processes(mesh: Mesh, axis: str) -> int:
    lines = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    lines = lines.reshape(-1, mesh.shape[axis])
    return max(len({device.process_index for device in line}) for line in lines)


def slow_axes(figures: Sequence[Figure]) -> list[str]:
    """Returns a sentence for each axis that is much slower than the fastest one."""
    best: dict[str, Figure] = {}
    for figure in figures:
        if figure.operation == OPERATIONS[0]:
            old = best.get(figure.axis)
            if old is None or figure.bandwidth > old.bandwidth:
                best[figure.axis] = figure
    if not best:
        return []
    fastest = max(best.values(), key=lambda figure: figure.bandwidth)
    sentences = []
    for figure in best.values():
        ratio = fastest.bandwidth / figure.bandwidth
        if ratio > SLOW:
            reason = "Check the links between its devices."
            if figure.processes > fastest.processes:
                reason = (
                    f"It spans {figure.processes} processes, the fastest axis "
                    f"{fastest.processes}: put the axis with the least traffic there, "
                    "such as replica or data."
                )
            sentences.append(
                f"Axis {figure.axis} moves {_rate(figure)}, {ratio:.0f} times less "
                f"than {fastest.axis} with {_rate(fastest)}. {reason}"
            )
    return sentences


def table(figures: Sequence[Figure]) -> str:
    rows = [("axis", "operation", "per device", "time", "bandwidth")]
    for figure in figures:
        label = f"{figure.axis}={figure.size}"
        first = figure.operation == OPERATIONS[0] and figure.bytes == figures[0].bytes
        rows.append(
            (
                label if first else "",
                figure.operation,
                human_bytes(figure.bytes),
                f"{1e6 * figure.seconds:,.0f} us",
                _rate(figure),
            )
        )
    return align(rows, right=(2, 3, 4))


def _rate(figure: Figure) -> str:
    return f"{human_bytes(round(figure.bandwidth))}/s"


def run(
    mesh: Mesh,
    group: Group,
    folder: RunFolder,
    hosts: Sequence[str],
    console: Console,
) -> None:
    """Measures the network, prints the figures and writes them to the run folder.

    Skipped if an earlier attempt has measured the same mesh on the same hosts. Every
    process must call this.
    """
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    kind = mesh.devices.flat[0].device_kind
    setting = {"mesh": sizes, "device_kind": kind, "hosts": list(hosts)}
    known = folder.is_writer and _is_known(folder.path / FILE, setting, console)
    report = {"known": known}
    if group.consult("network", report, lambda reports: reports[0])["known"]:
        return
    figures = measure(mesh, group)
    slow = slow_axes(figures)
    console.print("Network by mesh axis:")
    console.print("\n".join([table(figures), *slow]), markup=False)
    document = {"figures": [figure.to_json() for figure in figures], "slow": slow}
    folder.write_json(FILE, {**setting, **document})


def _is_known(path: Path, setting: Mapping[str, Any], console: Console) -> bool:
    if not path.exists():
        return False
    try:
        old = json.loads(path.read_text())
    except ValueError as error:  # damaged; it only saves time
        line = f"The network is measured again: {path} cannot be used ({error})"
        console.print(line, markup=False)
        return False
    return {name: old.get(name) for name in setting} == setting
