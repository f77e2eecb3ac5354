"""Checks that replicas of arrays on several devices are equal.

An array that is replicated over some mesh axes has replicas that must be equal bit for
bit. A device that computes wrongly or has faulty memory makes them differ, and training
continues with a model that is no longer consistent. Each device computes digests of its
own shards; only the digests are exchanged, and every process compares all of them.
"""

import collections
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding.logical_axes import path_name
from ..program.digest import array_digest, hexadecimal
from ..program.state import State


class ReplicasDiffer(ValueError):
    """Replicas of an array are not equal."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Devices whose replicas of one shard of an array are not all equal.

    Attributes:
      path: the path of the array.
      digests: the digest of each device's replica.
    """

    path: str
    digests: dict[Any, str]

    @property
    def groups(self) -> list[tuple[str, list[Any]]]:
        """Pairs of a digest and the devices that have it, the most frequent first."""
        devices = collections.defaultdict(list)
        for device, digest in self.digests.items():
            devices[digest].append(device)
        return sorted(devices.items(), key=lambda item: -len(item[1]))

    def to_json(self) -> dict[str, Any]:
        copies = [
            {"device": d.id, "process": d.process_index, "digest": digest}
            for d, digest in self.digests.items()
        ]
        return {"array": self.path, "copies": copies}

    def __str__(self) -> str:
        (common, most), *others = self.groups
        if len(most) > len(self.digests) / 2:
            parts = [f"{_names(devices)} has {digest}" for digest, devices in others]
            return f"{self.path}: {', '.join(parts)}; {_names(most)} agree on {common}"
        parts = [f"{_names(devices)} has {digest}" for digest, devices in self.groups]
        return f"{self.path}: {', '.join(parts)}; there is no majority"


def differences(tree: Any) -> list[Difference]:
    """Returns where replicas differ in a tree of arrays on one mesh.

    Every process must call this; all get the same result.
    """
    leaves = [
        (path_name(path), x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if _replicated_axes(x.sharding)
    ]
    if not leaves:
        return []
    mesh = leaves[0][1].sharding.mesh
    specs = tuple(x.sharding.spec for _, x in leaves)
    digests = np.asarray(_on_each_device(mesh, specs)([x for _, x in leaves]))
    differing = []
    for i, (path, x) in enumerate(leaves):
        lanes = _by_shard(digests[..., i, :], x.sharding)
        devices = _by_shard(mesh.devices, x.sharding)
        for replicas, holders in zip(lanes, devices, strict=True):
            if (replicas != replicas[0]).any():
                by_device = dict(zip(holders, map(hexadecimal, replicas), strict=True))
                differing.append(Difference(path, by_device))
    return differing


def _replicated_axes(sharding: Any) -> tuple[str, ...]:
    """Returns the mesh axes larger than 1 over which an array is replicated."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise TypeError(
            f"expected an array on a mesh, got one with sharding {sharding}"
        )
    used = set()
    for entry in sharding.spec:
        used |= set(entry) if isinstance(entry, tuple) else {entry}
    sizes = sharding.mesh.shape
    return tuple(axis for axis in sizes if axis not in used and sizes[axis] > 1)


@functools.lru_cache(maxsize=4)
def _on_each_device(mesh: Mesh, specs: tuple[P, ...]) -> Callable[[list], jax.Array]:
    """Returns a jitted function that digests each device's own shard of each array.

    Its result is [*mesh axes, array, lane], replicated on every device.
    """
    axes = mesh.axis_names

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=P(*axes),
        check_vma=False,
    )
    def own(shards):
        digests = jnp.stack([array_digest(shard) for shard in shards])
        return digests.reshape((1,) * len(axes) + digests.shape)

    return jax.jit(own, out_shardings=NamedSharding(mesh, P()))


def _by_shard(values: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """Reshapes [*mesh axes, ...] to [shard, replica, ...]."""
    axes = sharding.mesh.axis_names
    replicated = [axes.index(axis) for axis in _replicated_axes(sharding)]
    sharded = [i for i in range(len(axes)) if i not in replicated]
    rest = values.shape[len(axes) :]
    ordered = values.transpose(*sharded, *replicated, *range(len(axes), values.ndim))
    num_replicas = int(np.prod([values.shape[i] for i in replicated]))
    return ordered.reshape(-1, num_replicas, *rest)


@dataclasses.dataclass
class CheckReplicas:
    """Stops the run if replicas differ, and leaves evidence in the run folder.

    Attributes:
      last_equal: the step of the last check that passed; the first step of this
        attempt before there was one.
    """

    every: int
    folder: Path
    process: int
    last_equal: int

    def __call__(self, step: int, state: State) -> None:
        tree = state.to_tree()
        differing = differences(tree)
        if not differing:
            self.last_equal = step
            return
        files = save_evidence(self.folder, self.process, step, tree, differing)
        lines = "\n".join(map(str, differing))
        raise ReplicasDiffer(
            f"at step {step} replicas that must be equal differ between devices, in "
            f"{len(differing)} shards. They were equal at step {self.last_equal}; a "
            "checkpoint saved since may be wrong. Replace or exclude the faulty "
            "devices, remove those checkpoints and run the same command again. "
            f"Evidence: {files}:\n{lines}"
        )


def save_evidence(
    folder: Path, process: int, step: int, tree: Any, differing: list[Difference]
) -> str:
    """Writes all digests, and the differing replicas that this process holds.

    Returns:
      Where they are, or why they could not be written.
    """
    text, copies = f"replicas-{step}.json", f"replicas-{step}-{process}.npz"
    try:
        if process == 0:
            pieces = [difference.to_json() for difference in differing]
            document = {"step": step, "pieces": pieces}
            (folder / text).write_text(json.dumps(document, indent=1) + "\n")
        np.savez(folder / copies, **_copies(tree, differing))  # type: ignore
    except OSError as error:
        return f"could not be written ({error})"
    return f"{folder / text} and, for each process, {copies}"


def _copies(tree: Any, differing: list[Difference]) -> dict[str, np.ndarray]:
    """Returns {path|device: replica}; dtypes unknown to numpy as unsigned integers."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {path_name(path): x for path, x in leaves}
    held = {}
    for difference in differing:
        for shard in arrays[difference.path].addressable_shards:
            if shard.device in difference.digests:
                copy = np.asarray(shard.data)
                if copy.dtype.kind == "V":  # bfloat16 and the like
                    copy = copy.view(f"u{copy.dtype.itemsize}")
                held[f"{difference.path}|{shard.device.id}"] = copy
    return held


def _names(devices: list[Any]) -> str:
    """Names devices, such as "device 3 (process 1)"."""
    names = [f"{d.id} (process {d.process_index})" for d in devices]
    return f"{'device' if len(names) == 1 else 'devices'} {', '.join(names)}"
