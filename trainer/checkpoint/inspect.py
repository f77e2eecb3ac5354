"""`meshloom ckpt`: the contents of a checkpoint, whether it is intact, how two differ.

One CPU device is enough: arrays are read one at a time, into host memory.
"""

import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from ...launch import atomic_file
from ...sharding.logical_axes import path_name
from ...sharding.text import align, human_bytes
from ..program.digest import tree_digests
from ..record.failures import CorruptCheckpoint, Unreadable
from ..record.run_folder import RunFolder
from ..record.storage import is_remote, location
from . import manifest, reading
from .manager import STATE, committed_steps

AS_NUMPY = ocp.RestoreArgs(restore_type=np.ndarray)


@dataclasses.dataclass(frozen=True)
class Stored:
    """One committed step on disk."""

    folder: epath.Path
    step: int

    @classmethod
    def find(cls, run: epath.PathLike, step: int | None = None) -> "Stored":
        """Of a run folder, its checkpoints' folder, or one step's folder."""
        run = location(run)
        if run.name.isdigit() and (run / STATE).exists() and step is None:
            return cls.find(run.parent, int(run.name))
        folder = _checkpoints_of(run)
        steps = committed_steps(folder)
        if not steps:
            raise ValueError(
                f"{run} holds no committed checkpoint. Name a run folder, its "
                "checkpoints' folder, or the folder of one step."
            )
        if step is not None and step not in steps:
            raise ValueError(
                f"{folder} has no committed checkpoint of step {step}; it has "
                f"{', '.join(map(str, steps))}"
            )
        return cls(folder, steps[-1] if step is None else step)

    @property
    def path(self) -> epath.Path:
        return self.folder / str(self.step)

    def manifest(self) -> dict[str, Any]:
        reading.commit_record(self.path)
        return manifest.read(self.folder, self.step)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every array, one at a time, with its path."""
        with ocp.PyTreeCheckpointer() as reader:
            tree = reader.metadata(self.path / STATE).item_metadata.tree
            paths, form = jax.tree_util.tree_flatten_with_path(tree)
            for i, (path, _) in enumerate(paths):
                others = [ocp.PLACEHOLDER] * len(paths)
                item = form.unflatten([*others[:i], 0, *others[i + 1 :]])
                found = reader.restore(
                    self.path / STATE,
                    args=ocp.args.PyTreeRestore(
                        item=item, restore_args=form.unflatten([AS_NUMPY] * len(paths))
                    ),
                )
                yield path_name(path), form.flatten_up_to(found)[i]


def ls(run: epath.PathLike) -> str:
    """A line for each step, also for those that are not committed."""
    folder = Stored.find(run).folder
    committed = committed_steps(folder)
    rows = [("step", "state", "saved", "size", "mesh", "processes")]
    for path in sorted(folder.iterdir(), key=lambda p: (len(p.name), p.name)):
        if not path.is_dir():
            continue
        size = _bytes_below(path)
        if not path.name.isdigit() or int(path.name) not in committed:
            rows.append((path.name, "not committed", "", human_bytes(size), "", ""))
            continue
        try:
            found = Stored(folder, int(path.name)).manifest()
        except (CorruptCheckpoint, Unreadable) as error:
            state = "damaged" if isinstance(error, CorruptCheckpoint) else "unreadable"
            rows.append((path.name, state, "", human_bytes(size), "", ""))
            continue
        where = found.get("environment", {})
        rows.append(
            (
                path.name,
                "committed",
                _date(found["time"]),
                human_bytes(size),
                str(where.get("mesh", "?")),
                str(where.get("num_processes", "?")),
            )
        )
    return align(rows, right=(0, 3, 5))


def inspect(stored: Stored) -> str:
    """The tree with shapes, types and bytes, and where it came from."""
    found = stored.manifest()
    rows = [("array", "shape", "type", "bytes", "digest")]
    total = 0
    for path, array in found["arrays"].items():
        size = int(np.prod(array["shape"])) * np.dtype(array["dtype"]).itemsize
        shape = "x".join(map(str, array["shape"])) or "scalar"
        total += size
        rows.append((path, shape, array["dtype"], human_bytes(size), array["digest"]))
    facts = [
        ("step", str(found["step"])),
        ("saved", _date(found["time"])),
        ("bytes", human_bytes(total)),
        ("config digest", str(found.get("config_digest", "?"))),
        ("next example", str(found.get("data", {}).get("next_example", "?"))),
        *sorted((k, str(v)) for k, v in found.get("environment", {}).items()),
    ]
    return f"{align(rows, right=(3,))}\n\n{align(facts)}"


def verify(stored: Stored) -> list[str]:
    """What is wrong with a committed step, one line each; [] if nothing."""
    try:
        expected = stored.manifest()["arrays"]
    except (CorruptCheckpoint, Unreadable) as error:
        return [str(error)]
    seen, lines = set(), []
    try:
        for path, array in stored.arrays():
            seen.add(path)
            if path not in expected:
                lines.append(f"{path}: on disk, but not in the manifest")
            elif (found := _digest(array)) != expected[path]["digest"]:
                lines.append(
                    f"{path}: digest {found}, but {expected[path]['digest']} was saved"
                )
    except Exception as error:  # of tensorstore and orbax, of many types
        lines.append(f"{stored.path} cannot be read: {str(error).splitlines()[0]}")
    lines += [f"{path}: saved, but not read" for path in expected if path not in seen]
    return lines


def diff(a: Stored, b: Stored) -> list[str]:
    """Arrays that differ between two checkpoints, or exist in only one."""
    left, right = (x.manifest()["arrays"] for x in (a, b))
    changed = {
        path
        for path in left.keys() & right.keys()
        if left[path]["digest"] != right[path]["digest"]
    }
    values = dict(_only(a, changed))
    largest = {}
    for path, new in _only(b, changed):
        old = values.pop(path)
        if old.shape == new.shape and old.dtype == new.dtype:
            gap = np.abs(old.astype(np.float64) - new.astype(np.float64))
            largest[path] = float(gap.max())
    lines = []
    for path in dict.fromkeys([*left, *right]):
        if path not in right or path not in left:
            lines.append(f"{'-' if path in left else '+'} {path}")
        elif path in largest:
            lines.append(f"~ {path}: largest difference {largest[path]:.3g}")
        elif path in changed:
            old, new = (manifest.format_array(x[path]) for x in (left, right))
            lines.append(f"~ {path}: {old} -> {new}")
    return lines


def export(stored: Stored, file: Path, *, params_only: bool = True) -> int:
    """Writes a safetensors file atomically; returns the number of arrays."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        raise ValueError(
            "ckpt export needs the package safetensors, which is not installed; "
            "install it with: pip install 'meshloom[safetensors]'"
        ) from error
    # The library writes an array's memory as it lies there, so it must be in C order.
    # np.ascontiguousarray would turn a scalar into a vector.
    arrays = {
        path.removeprefix("params/"): np.asarray(array, order="C")
        for path, array in stored.arrays()
        if path.startswith("params/") or not params_only
    }
    with atomic_file.replacing(file) as draft:
        draft.touch()
        mode = draft.stat().st_mode  # as the umask has it; the library makes it 0600
        try:
            save_file(arrays, draft, metadata={"step": str(stored.step)})
        except SafetensorError as error:
            raise ValueError(
                f"step {stored.step} cannot be exported: {error}. `meshloom ckpt "
                "inspect` shows the type of each array."
            ) from error
        draft.chmod(mode)
    return len(arrays)


def _only(stored: Stored, paths: set[str]) -> Iterator[tuple[str, np.ndarray]]:
    return ((path, array) for path, array in stored.arrays() if path in paths)


def _digest(array: np.ndarray) -> str:
    return tree_digests({"x": array})["x"]


def _checkpoints_of(run: epath.Path) -> epath.Path:
    """Of a run folder, where it saves; any other folder is taken as it is."""
    if not is_remote(run):
        folder = RunFolder(Path(run)).checkpoints
        if folder.is_dir():
            return folder
    return run


def _bytes_below(path: epath.Path) -> int:
    return sum(
        _bytes_below(entry) if entry.is_dir() else int(entry.stat().length)
        for entry in path.iterdir()
    )


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
