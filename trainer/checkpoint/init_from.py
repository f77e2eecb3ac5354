"""Initializes a run from the weights of another: its parameters and variables."""

from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from ..job.group import Group
from ..program.build import Program
from ..program.state import Layout, State
from ..record.failures import CorruptCheckpoint
from . import manifest
from .inspect import Stored
from .manager import latest_step, restore_part

PARTS = ("params", "variables")


def check(source: str | None, program: Program, saved: epath.Path) -> None:
    """Raises ValueError if a new run cannot be initialized from the given weights.

    A run with a checkpoint of its own no longer needs them, and they may be gone.

    Args:
      source: the setting init_from; None for a run that starts with new weights.
      saved: the folder of the run's own checkpoints.
    """
    if source is not None and latest_step(saved) is None:
        find(source, program)


def find(source: str, program: Program) -> Stored:
    """Returns the checkpoint to start from; raises ValueError if it does not fit."""
    try:
        stored = Stored.find(source)
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from error
    if lines := misfits(stored, program.layout, program.mesh, program.model):
        raise ValueError(
            f"init_from: the weights of checkpoint {stored.path} do not fit this "
            f"config, in {len(lines)} arrays. Use the model that they were saved with, "
            "or start without them (init_from=None):\n" + "\n".join(lines)
        )
    return stored


def initialize(
    stored: Stored, program: Program, group: Group, *, seed: int = 0
) -> tuple[State, str]:
    """Returns a state with the weights of a checkpoint, and a line for the log.

    Every process must call this.

    Args:
      seed: for parameters that a checkpoint of the model's base does not have.
    """
    layout, mesh = program.layout, program.mesh
    try:
        parts = read_weights(stored, layout, mesh, group, program.model)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"init_from: {error}. Choose another.") from error
    counts = " and ".join(
        f"{len(jax.tree.leaves(tree))} arrays of "
        + ("parameters" if name == "params" else name)
        for name, tree in parts.items()
    )
    message = (
        f"Starting with the weights of {stored.path}: {counts}, digests verified. The "
        "optimizer and the step count start from scratch."
    )
    params, variables = parts["params"], parts.get("variables", {})
    if is_of_base(stored, program.model):
        new = jax.jit(
            lambda key: layout.init(key).params,
            out_shardings=layout.shardings(mesh).params,
        )
        params, variables = new(jax.random.key(seed)), params
        message += " They are the variables of this model; its parameters are new."
    return layout.create_from(params, variables, mesh), message


def is_of_base(stored: Stored, model: Any) -> bool:
    """Returns whether a checkpoint is of the model that this one adapts.

    Its parameters are the variables of this model; see contract.py.
    """
    paths = stored.manifest()["arrays"]
    has_variables = any(path.startswith("variables/") for path in paths)
    return hasattr(model, "base") and not has_variables


def misfits(stored: Stored, layout: Layout, mesh: Mesh, model: Any = None) -> list[str]:
    """Returns a line for each saved weight that is not one of the layout's.

    Args:
      model: the checkpoint may be of its base; None if it may not.
    """
    arrays = stored.manifest()["arrays"].items()
    weights = {path: x for path, x in arrays if path.split("/")[0] in PARTS}
    target = _target(stored, layout, mesh, model)
    return manifest.mismatches({"arrays": weights}, target)


def read_weights(
    stored: Stored, layout: Layout, mesh: Mesh, group: Group, model: Any = None
) -> dict[str, Any]:
    """Reads the weights into the shardings of a mesh, and verifies their digests.

    Every process must call this. Layers are in model order.

    Args:
      model: the checkpoint may be of its base; None if it may not.

    Raises:
      CorruptCheckpoint: they are not what was saved.
    """
    # Before the digests: a process that gives up alone leaves the others waiting.
    with group.all_or_none("weights"):
        target = _target(stored, layout, mesh, model)
        parts = restore_part(stored.folder, stored.step, target, group)
    if paths := manifest.differences(stored.manifest(), parts):
        raise CorruptCheckpoint(
            f"checkpoint {stored.path} is not what was saved: the digests of "
            f"{len(paths)} arrays differ, first {paths[0]}"
        )
    return parts


def _target(stored: Stored, layout: Layout, mesh: Mesh, model: Any) -> dict[str, Any]:
    """Returns what to read, by the name of the part that it was saved as."""
    tree = layout.placed(mesh).to_tree()
    if is_of_base(stored, model):
        return {"params": tree["variables"]}
    return {name: tree[name] for name in PARTS if name in tree}
