"""Beginning a run with the weights of another: its parameters, and nothing else."""

from typing import Any

from . import distributed, manifest
from .checkpoint import latest_step, restore_params
from .checkpoint_tools import Stored
from .failures import CorruptCheckpoint
from .run_folder import RunFolder
from .setup import Setup
from .state import State
from .storage import checkpoints_of

PREFIX = "params/"


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
    target = {"params": setup.layout.abstract.params}
    if lines := manifest.misfits(_only_params(stored.manifest()), target):
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
            params = restore_params(
                stored.folder,
                stored.step,
                layout.abstract.params,
                layout.params.shardings(mesh),
            )
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"init_from: {error}. Choose another.") from error
    if paths := manifest.differences(stored.manifest(), {"params": params}):
        raise CorruptCheckpoint(
            f"{where} is not what was saved: the digests of {len(paths)} arrays "
            f"differ, first {paths[0]}. Choose another."
        )
    count = len(_only_params(stored.manifest())["arrays"])
    taken = (
        f"Beginning with the weights of {stored.path}: {count} arrays of parameters, "
        "digests as saved. The optimizer and the step count begin anew."
    )
    return layout.create_from(params, mesh), taken


def _only_params(found: dict[str, Any]) -> dict[str, Any]:
    arrays = found["arrays"].items()
    return {"arrays": {path: x for path, x in arrays if path.startswith(PREFIX)}}
