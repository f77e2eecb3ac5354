"""Beginning a run with the weights of another: its parameters and variables only."""

from typing import Any

import jax

from . import distributed, manifest
from .checkpoint import latest_step, restore_part
from .checkpoint_tools import Stored
from .failures import CorruptCheckpoint
from .run_folder import RunFolder
from .setup import Setup
from .state import State
from .storage import checkpoints_of

PARTS = ("params", "variables")


def check(setup: Setup, folder: RunFolder) -> None:
    """Raises ValueError where a new run cannot begin with the weights asked for.

    A run with a checkpoint of its own needs them no more, and they may be gone.
    """
    init_from = setup.config.init_from
    saved = checkpoints_of(folder.path, setup.config.checkpoint_folder)
    if init_from is not None and latest_step(saved) is None:
        find(init_from, setup)


def find(init_from: str, setup: Setup) -> Stored:
    """The checkpoint to begin with; raises ValueError where it does not fit."""
    try:
        stored = Stored.find(init_from)
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from error
    if lines := manifest.misfits(_only_weights(stored.manifest()), _target(setup)):
        raise ValueError(
            f"init_from: the weights of checkpoint {stored.path} do not fit this "
            f"config, in {len(lines)} arrays. Use the model that they were saved with, "
            "or begin without them (init_from=None):\n" + "\n".join(lines)
        )
    return stored


def begin(stored: Stored, setup: Setup) -> tuple[State, str]:
    """A new state with the weights of a checkpoint, and what was taken, in words."""
    layout, mesh = setup.layout, setup.mesh
    where = f"init_from: checkpoint {stored.path}"
    try:
        # Before the digests: a process that gives up alone leaves the others waiting.
        with distributed.all_or_none("init_from"):
            found = restore_part(stored.folder, stored.step, _target(setup))
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


def _target(setup: Setup) -> dict[str, Any]:
    tree = setup.abstract_state.to_tree()
    return {name: tree[name] for name in PARTS if name in tree}


def _only_weights(found: dict[str, Any]) -> dict[str, Any]:
    arrays = found["arrays"].items()
    return {"arrays": {path: x for path, x in arrays if path.split("/")[0] in PARTS}}
