"""What a checkpoint says of itself: digests of its arrays, and where they came from.

It lies in the checkpoint, is committed with it, and does not depend on the mesh or the
processes that wrote it, but for the lines that name them.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from ...sharding.logical_axes import path_name
from ..program.digest import tree_digests
from ..record.storage import location
from .reading import judged

FORMAT = 1
ITEM = "manifest"  # the folder of a step that holds it
LOSS = "held_out_loss"  # of the same step, where it was measured


def make(step: int, tree: Any, about: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a tree of arrays, layers in their own order.

    Args:
      about: what else it shall say: config, mesh, position in the data, versions.
    """
    digests = tree_digests(tree)
    shapes = describe(tree)
    return {
        "format": FORMAT,
        "step": step,
        "time": time.time(),
        **about,
        "arrays": {path: {**shapes[path], "digest": digests[path]} for path in shapes},
    }


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """{path: shape and type} of a tree of arrays or shapes."""
    return {
        path_name(path): {"shape": list(x.shape), "dtype": np.dtype(x.dtype).name}
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def read(folder: epath.PathLike, step: int) -> dict[str, Any]:
    """The manifest of a committed step."""
    path = location(folder) / str(step) / ITEM / "metadata"
    try:
        found = json.loads(path.read_text())
    except Exception as error:  # of a bucket's client too, of many types
        raise judged(error, path.parent) from error
    if found.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected a manifest of format {FORMAT}, found "
            f"{found.get('format')!r}. It was written by another version."
        )
    return found


def misfits(manifest: Mapping[str, Any], target: Any) -> list[str]:
    """Leaf by leaf, why a checkpoint cannot be restored as `target`; [] if it can."""
    saved, wanted = manifest["arrays"], describe(target)
    lines = []
    for path in dict.fromkeys([*wanted, *saved]):
        if path not in saved:
            lines.append(f"{path}: wanted, but not in the checkpoint")
        elif path not in wanted:
            lines.append(f"{path}: in the checkpoint, but not wanted")
        else:
            old, new = (words(arrays[path]) for arrays in (saved, wanted))
            if old != new:
                lines.append(f"{path}: saved as {old}, wanted as {new}")
    return lines


def differences(manifest: Mapping[str, Any], tree: Any) -> list[str]:
    """Paths of arrays that are not what the manifest says."""
    saved = manifest["arrays"]
    return [
        path
        for path, digest in tree_digests(tree).items()
        if saved[path]["digest"] != digest
    ]


def state_digest(manifest: Mapping[str, Any]) -> str:
    """One digest of all arrays as they were saved, to compare whole states by."""
    arrays = manifest["arrays"]
    return _joined({path: array["digest"] for path, array in arrays.items()})


def tree_digest(tree: Any) -> str:
    """The same of a tree of arrays, computed from what the devices hold."""
    return _joined(tree_digests(tree))


def _joined(digests: Mapping[str, str]) -> str:
    lines = [f"{path} {digests[path]}\n" for path in sorted(digests)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def words(array: Mapping[str, Any]) -> str:
    return f"{array['dtype']}[{','.join(map(str, array['shape']))}]"
