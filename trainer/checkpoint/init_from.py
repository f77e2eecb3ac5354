"""Beginning a run with the weights of another: its parameters and variables only."""

from typing import Any

import jax
from etils import epath

from ..job.group import Group
from ..program.build import Program
from ..program.state import State
from ..record.failures import CorruptCheckpoint
from . import manifest
from .inspect import Stored
from .manager import latest_step, restore_part

PARTS = ("params", "variables")


def check(source: str | None, program: Program, saved: epath.Path) -> None:
    """Raises ValueError where a new run cannot begin with the weights asked for.

    A run with a checkpoint of its own needs them no more, and they may be gone.

    Args:
      source: the setting init_from; None for a run that begins with new weights.
      saved: the folder of the run's own checkpoints.
    """
    if source is not None and latest_step(saved) is None:
        find(source, program)


def find(source: str, program: Program) -> Stored:
    """The checkpoint to begin with; raises ValueError where it does not fit."""
    try:
        stored = Stored.find(source)
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from error
    if lines := manifest.misfits(_only_weights(stored.manifest()), _target(program)):
        raise ValueError(
            f"init_from: the weights of checkpoint {stored.path} do not fit this "
            f"config, in {len(lines)} arrays. Use the model that they were saved with, "
            "or begin without them (init_from=None):\n" + "\n".join(lines)
        )
    return stored


def begin(stored: Stored, program: Program, group: Group) -> tuple[State, str]:
    """Initializes the state from a checkpoint's weights; also returns a log line."""
    layout, mesh = program.layout, program.mesh
    where = f"init_from: checkpoint {stored.path}"
    try:
        # Before the digests: a process that gives up alone leaves the others waiting.
        with group.all_or_none("init_from"):
            found = restore_part(stored.folder, stored.step, _target(program), group)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"init_from: {error}. Choose another.") from error
    if paths := manifest.differences(stored.manifest(), found):
        raise CorruptCheckpoint(
            f"{where} is not what was saved: the digests of {len(paths)} arrays "
            f"differ, first {paths[0]}. Choose another."
        )
    counts = [len(jax.tree.leaves(found[name])) for name in found]
    words = " and ".join(
        f"{count} arrays of {'parameters' if name == 'params' else name}"
        for name, count in zip(found, counts, strict=True)
    )
    taken = (
        f"Beginning with the weights of {stored.path}: {words}, digests as saved. The "
        "optimizer and the step count begin anew."
    )
    state = layout.create_from(found["params"], found.get("variables", {}), mesh)
    return state, taken


def _target(program: Program) -> dict[str, Any]:
    tree = program.abstract_state.to_tree()
    return {name: tree[name] for name in PARTS if name in tree}


def _only_weights(found: dict[str, Any]) -> dict[str, Any]:
    arrays = found["arrays"].items()
    return {"arrays": {path: x for path, x in arrays if path.split("/")[0] in PARTS}}
