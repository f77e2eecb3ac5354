"""Files of a checkpoint of the service: one with the arrays of a block, and its index.

The arrays are .npy records one after the other, which np.load reads back one by one.
The index, JSON, has their names, dtypes and the CRC32C of the file. Both are written to
a temporary name, synced and renamed, the index last. Nothing is pickled.
"""

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from ..wire.errors import Refused


def write_state(
    folder: Path | None,
    block: int,
    facts: Mapping[str, Any],
    params: Any,
    opt_state: Any,
) -> int:
    """Writes parameters and optimizer state of a block; returns the CRC32C.

    Args:
      folder: None writes nothing.
    """
    named = {f"params/{path}": array for path, array in params.items()}
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    named |= {_name(path): np.asarray(leaf) for path, leaf in leaves}
    return write(folder, block, facts, named)


def read_state(
    folder: Path,
    block: int,
    facts: Mapping[str, Any],
    paths: Iterable[str],
    init: Callable[[dict[str, np.ndarray]], Any],
) -> tuple[dict[str, np.ndarray], Any]:
    """Returns parameters and optimizer state of a block.

    Args:
      paths: of the parameters.
      init: parameters -> an optimizer state with the structure of the one to read.
    """
    found = read(folder, block, facts)
    params = {path: found.pop(f"params/{path}") for path in paths}
    leaves, structure = jax.tree_util.tree_flatten_with_path(init(params))
    shapes = {_name(path): (x.shape, x.dtype) for path, x in leaves}
    if shapes != {name: (array.shape, array.dtype) for name, array in found.items()}:
        raise Refused(
            f"{_data_path(folder, block)}: the optimizer state is not that of this "
            "job; was the optimizer changed since the checkpoint?"
        )
    arrays = [jnp.asarray(found[_name(path)]) for path, _ in leaves]
    return params, jax.tree.unflatten(structure, arrays)


def write(
    folder: Path | None,
    block: int,
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
) -> int:
    """Writes a block and returns the CRC32C of its arrays.

    Args:
      folder: None writes nothing.
      facts: what must be equal when the block is read.
    """
    buffer = io.BytesIO()
    for array in arrays.values():
        np.lib.format.write_array(buffer, plain(array), allow_pickle=False)
    data = buffer.getvalue()
    crc = google_crc32c.value(data)
    if folder is None:
        return crc
    _replace(_data_path(folder, block), data)
    index = {
        **facts,
        "nbytes": len(data),
        "crc32c": crc,
        "arrays": [[name, array.dtype.name] for name, array in arrays.items()],
    }
    _replace(_index_path(folder, block), json.dumps(index, indent=1).encode())
    return crc


def read(folder: Path, block: int, facts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of a block by name. Refuses a file that is not as written."""
    index = _read_index(_index_path(folder, block))
    for name, expected in facts.items():
        if index.get(name) != expected:
            raise Refused(
                f"{_index_path(folder, block)}: {name} is {index.get(name)!r}, "
                f"expected {expected!r}; this is a checkpoint of another job or version"
            )
    path = _data_path(folder, block)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Refused(f"{path} is missing; use another checkpoint") from None
    if len(data) != index["nbytes"] or google_crc32c.value(data) != index["crc32c"]:
        raise Refused(
            f"{path} is damaged: {len(data)} bytes, with another size or CRC32C than "
            "in its index; use another checkpoint"
        )
    buffer = io.BytesIO(data)
    return {
        name: np.lib.format.read_array(buffer, allow_pickle=False).view(
            jnp.dtype(dtype)
        )
        for name, dtype in index["arrays"]
    }


def _name(path: Any) -> str:
    return f"opt_state/{jax.tree_util.keystr(path)}"


def _read_index(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Refused(f"{path} is missing; use another checkpoint") from None
    except ValueError as error:
        raise Refused(
            f"{path} is not JSON ({error}); use another checkpoint"
        ) from error


def plain(array: np.ndarray) -> np.ndarray:
    """Returns the array in a dtype of numpy's own: .npy has no name for bfloat16."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def _replace(path: Path, data: bytes) -> None:
    """Writes a file atomically and durably."""
    draft = path.with_name(f".{path.name}.tmp")
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _data_path(folder: Path, block: int) -> Path:
    return folder / f"block-{block:06d}.npys"


def _index_path(folder: Path, block: int) -> Path:
    return folder / f"block-{block:06d}.json"
