"""The manifest of a checkpoint: digests of its arrays, and where they came from.

It is part of the checkpoint and is committed with it. Apart from the entries that
describe them, it does not depend on the mesh or the processes that wrote it.
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
from .reading import classify

FORMAT = 1
ITEM = "manifest"  # the folder within a step that holds it
LOSS = "held_out_loss"  # at the same step, if it was measured
EVALUATED = "evaluated"  # all evaluations so far, for stopping early


def make(step: int, tree: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest of a tree of arrays, with layers in their canonical order.

    Args:
      metadata: further entries: config, mesh, position in the data, versions.
    """
    digests = tree_digests(tree)
    shapes = describe(tree)
    return {
        "format": FORMAT,
        "step": step,
        "time": time.time(),
        **metadata,
        "arrays": {path: {**shapes[path], "digest": digests[path]} for path in shapes},
    }


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """Returns {path: shape and dtype} of a tree of arrays or ShapeDtypeStructs."""
    return {
        path_name(path): {"shape": list(x.shape), "dtype": np.dtype(x.dtype).name}
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def read(folder: epath.PathLike, step: int) -> dict[str, Any]:
    """Reads the manifest of a committed step."""
    path = location(folder) / str(step) / ITEM / "metadata"
    try:
        document = json.loads(path.read_text())
    except Exception as error:  # clients of buckets raise many types
        raise classify(error, path.parent) from error
    if document.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected a manifest of format {FORMAT}, found "
            f"{document.get('format')!r}. It was written by another version."
        )
    return document


def mismatches(manifest: Mapping[str, Any], target: Any) -> list[str]:
    """Returns a line for each array that does not match the tree `target`."""
    saved, expected = manifest["arrays"], describe(target)
    lines = []
    for path in dict.fromkeys([*expected, *saved]):
        if path not in saved:
            lines.append(f"{path}: expected, but not in the checkpoint")
        elif path not in expected:
            lines.append(f"{path}: in the checkpoint, but not expected")
        else:
            old, new = (format_array(arrays[path]) for arrays in (saved, expected))
            if old != new:
                lines.append(f"{path}: saved as {old}, expected {new}")
    return lines


def differences(manifest: Mapping[str, Any], tree: Any) -> list[str]:
    """Returns the paths of arrays whose digests differ from the manifest's."""
    saved = manifest["arrays"]
    return [
        path
        for path, digest in tree_digests(tree).items()
        if saved[path]["digest"] != digest
    ]


def state_digest(manifest: Mapping[str, Any]) -> str:
    """Returns one digest of all arrays as they were saved, to compare states by."""
    arrays = manifest["arrays"]
    return _joined({path: array["digest"] for path, array in arrays.items()})


def tree_digest(tree: Any) -> str:
    """Returns the same digest of a tree of arrays, computed on its devices."""
    return _joined(tree_digests(tree))


def _joined(digests: Mapping[str, str]) -> str:
    lines = [f"{path} {digests[path]}\n" for path in sorted(digests)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def format_array(array: Mapping[str, Any]) -> str:
    """Formats shape and dtype, such as float32[2,64]."""
    return f"{array['dtype']}[{','.join(map(str, array['shape']))}]"
