"""Whether devices that must hold the same numbers do.

An array that is whole on several devices, or cut over some mesh axes only, has copies
that must be equal bit for bit. A device that computes or remembers wrongly makes them
differ, and training goes on with a model that is not one any more. Each device digests
its own piece; only the digests travel, to all processes, which compare them alike.
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
    """Copies of an array that are not equal."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One group of devices whose copies of a piece of an array are not all equal.

    Attributes:
      digests: of each device's copy, by the device.
    """

    path: str
    digests: dict[Any, str]

    @property
    def groups(self) -> list[tuple[str, list[Any]]]:
        """(digest, devices that have it), the most frequent first."""
        found = collections.defaultdict(list)
        for device, digest in self.digests.items():
            found[digest].append(device)
        return sorted(found.items(), key=lambda item: -len(item[1]))

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
        return f"{self.path}: {', '.join(parts)}; which is right cannot be told"


def differences(tree: Any) -> list[Difference]:
    """Where copies differ in a tree of arrays on one mesh; [] in a sound one.

    Of a job of several processes all must call it, and all get the same.
    """
    leaves = [
        (path_name(path), x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if _free_axes(x.sharding)
    ]
    if not leaves:
        return []
    mesh = leaves[0][1].sharding.mesh
    specs = tuple(x.sharding.spec for _, x in leaves)
    digests = np.asarray(_on_each_device(mesh, specs)([x for _, x in leaves]))
    found = []
    for i, (path, x) in enumerate(leaves):
        lanes = _grouped(digests[..., i, :], x.sharding)
        devices = _grouped(mesh.devices, x.sharding)
        for group, holders in zip(lanes, devices, strict=True):
            if (group != group[0]).any():
                words = map(hexadecimal, group)
                found.append(Difference(path, dict(zip(holders, words, strict=True))))
    return found


def _free_axes(sharding: Any) -> tuple[str, ...]:
    """Mesh axes larger than 1 along which an array is repeated."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise TypeError(f"expected an array placed on a mesh, found {sharding}")
    used = set()
    for entry in sharding.spec:
        used |= set(entry) if isinstance(entry, tuple) else {entry}
    sizes = sharding.mesh.shape
    return tuple(axis for axis in sizes if axis not in used and sizes[axis] > 1)


@functools.lru_cache(maxsize=4)
def _on_each_device(mesh: Mesh, specs: tuple[P, ...]) -> Callable[[list], jax.Array]:
    """The jitted digests of each device's own piece of each array.

    The result is [every mesh axis, array, lane], on every device.
    """
    axes = mesh.axis_names

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=P(*axes),
        check_vma=False,
    )
    def own(pieces):
        digests = jnp.stack([array_digest(piece) for piece in pieces])
        return digests.reshape((1,) * len(axes) + digests.shape)

    return jax.jit(own, out_shardings=NamedSharding(mesh, P()))


def _grouped(values: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """[every mesh axis, ...] as [piece, copy, ...]."""
    axes = sharding.mesh.axis_names
    free = [axes.index(axis) for axis in _free_axes(sharding)]
    cut = [i for i in range(len(axes)) if i not in free]
    rest = values.shape[len(axes) :]
    ordered = values.transpose(*cut, *free, *range(len(axes), values.ndim))
    copies = int(np.prod([values.shape[i] for i in free]))
    return ordered.reshape(-1, copies, *rest)


@dataclasses.dataclass
class CheckReplicas:
    """Stops the run where copies differ, with evidence in the run folder.

    Attributes:
      sound: the step of the last check that found nothing; where the run began before.
    """

    every: int
    folder: Path
    process: int
    sound: int

    def __call__(self, step: int, state: State) -> None:
        tree = state.to_tree()
        found = differences(tree)
        if not found:
            self.sound = step
            return
        files = save_evidence(self.folder, self.process, step, tree, found)
        lines = "\n".join(map(str, found))
        raise ReplicasDiffer(
            f"at step {step} devices that must hold the same numbers differ, in "
            f"{len(found)} pieces of arrays. They were equal at step {self.sound}; a "
            "checkpoint saved after it may be wrong. Leave out or mend the devices, "
            f"remove those checkpoints and run again. Evidence: {files}:\n{lines}"
        )


def save_evidence(
    folder: Path, process: int, step: int, tree: Any, found: list[Difference]
) -> str:
    """Writes all digests, and the differing copies that this process holds.

    Returns where they are. The finding is said also where nothing can be written.
    """
    text, copies = f"replicas-{step}.json", f"replicas-{step}-{process}.npz"
    try:
        if process == 0:
            pieces = [one.to_json() for one in found]
            document = {"step": step, "pieces": pieces}
            (folder / text).write_text(json.dumps(document, indent=1) + "\n")
        np.savez(folder / copies, **_copies(tree, found))  # type: ignore
    except OSError as error:
        return f"it could not be written ({error})"
    return f"{folder / text} and, of each process, {copies}"


def _copies(tree: Any, found: list[Difference]) -> dict[str, np.ndarray]:
    """{path|device: its copy}; types that numpy does not know as unsigned integers."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {path_name(path): x for path, x in leaves}
    held = {}
    for one in found:
        for shard in arrays[one.path].addressable_shards:
            if shard.device in one.digests:
                copy = np.asarray(shard.data)
                if copy.dtype.kind == "V":  # bfloat16 and its like
                    copy = copy.view(f"u{copy.dtype.itemsize}")
                held[f"{one.path}|{shard.device.id}"] = copy
    return held


def _names(devices: list[Any]) -> str:
    """Device 3 (process 1), or several of them."""
    names = [f"{d.id} (process {d.process_index})" for d in devices]
    return f"{'device' if len(names) == 1 else 'devices'} {', '.join(names)}"
