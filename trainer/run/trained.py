"""The trained model of a run folder, for commands that use it on other data."""

import math
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from ...sharding import MeshSpec, Rules
from ...sharding.mesh import AXES
from ...sharding.resolve import resolve_dimensions
from ..checkpoint import init_from, manifest
from ..checkpoint.inspect import Stored
from ..checkpoint.manager import committed_steps
from ..data import corpus_files
from ..data.tokenizer import HuggingFaceTokenizer
from ..job.group import Group
from ..program.state import Layout, Model, State
from ..record import published
from ..record.run_folder import CONFIG_GIN, RunFolder

NEWEST, BEST = "newest", "best"


def find(run: Path, step: str = NEWEST) -> Stored:
    """Returns a checkpoint of a run folder.

    Args:
      step: "newest", "best" (the lowest held-out loss), or the number of a step.
    """
    folder = RunFolder(run)
    # An older folder may have no config.json, which names the checkpoints' folder.
    has_config = (folder.path / CONFIG_GIN).exists()
    steps = committed_steps(folder.checkpoints) if has_config else []
    if not steps:
        raise ValueError(
            f"{folder.path} does not contain a trained model: expected {CONFIG_GIN} "
            "and a checkpoint. Give the folder of a run that has saved one."
        )
    if step == BEST:
        return Stored(folder.checkpoints, _best(folder, steps))
    if step != NEWEST and not step.isdecimal():
        raise ValueError(
            f"--step {step!r}: expected {NEWEST}, {BEST} or the number of a saved "
            f"step; {folder.path} has {', '.join(map(str, steps))}"
        )
    number = _newest(folder.path, steps) if step == NEWEST else int(step)
    if number not in steps:
        raise ValueError(
            f"{folder.path} has no checkpoint of step {number}; it has "
            f"{', '.join(map(str, steps))}. Pass one of these as --step, or omit it."
        )
    return Stored(folder.checkpoints, number)


def tokenizer(run: Path) -> HuggingFaceTokenizer | None:
    """Returns the tokenizer in the folder of an imported model; None without one."""
    path = run / corpus_files.TOKENIZER
    return HuggingFaceTokenizer(path) if path.is_file() else None


def _newest(folder: Path, steps: list[int]) -> int:
    """Returns the step of the published weights; the newest if there are none."""
    newest = published.read(folder)
    if newest is None or newest.step in steps:
        return steps[-1] if newest is None else newest.step
    print(
        f"note: {folder / published.FILE} names step {newest.step}, which is gone; "
        f"using step {steps[-1]}",
        file=sys.stderr,
    )
    return steps[-1]


def _best(folder: RunFolder, steps: list[int]) -> int:
    """Returns the step with the lowest held-out loss; the newer of equal ones."""
    found = (
        (manifest.read(folder.checkpoints, s).get(manifest.LOSS), s) for s in steps
    )
    losses = [(loss, -step) for loss, step in found if loss is not None]
    if not losses:
        raise ValueError(
            f"--step {BEST}: no checkpoint of {folder.path} has a held-out loss, which "
            "is measured where eval_every and save_every meet. Pass --step "
            f"{NEWEST}, or one of {', '.join(map(str, steps))}."
        )
    return -min(losses)[1]


def make_mesh(sizes: str) -> Mesh:
    """Returns the mesh of a flag --mesh, on as many local devices as it names."""
    spec, devices = MeshSpec.parse(sizes), jax.local_devices()
    wanted = [getattr(spec, axis) for axis in AXES]
    is_open = -1 in wanted
    return spec.make(devices if is_open else devices[: math.prod(wanted)])


def row_multiple(model: Model, rules: Rules, mesh: Mesh) -> int:
    """Returns what the rows of a batch must be a multiple of on a mesh."""
    multiple = 1
    for name, axes in model.batch_axes().items():
        (rows,) = resolve_dimensions(
            axes[:1], (mesh.size,), rules, mesh, name=name, role="compute"
        )
        ways = math.prod(mesh.shape[axis] for axis in rows.mesh_axes)
        multiple = math.lcm(multiple, ways)
    return multiple


def restore(stored: Stored, layout: Layout, mesh: Mesh) -> State:
    """Restores the weights into a layout without an optimizer, and verifies them."""
    if lines := init_from.misfits(stored, layout, mesh):
        raise ValueError(
            f"checkpoint {stored.path} does not fit the config of its run folder, in "
            f"{len(lines)} arrays, first {lines[0]}. Restore the folder, or the code "
            "of the model, as it was when the run was trained."
        )
    parts = init_from.read_weights(stored, layout, mesh, Group())
    step = jax.device_put(np.int32(stored.step), layout.shardings(mesh).step)
    nothing = layout.abstract.opt_state
    state = State(step, parts["params"], nothing, parts.get("variables", {}))
    return layout.arranged(state, mesh)


def refuse_pipe(mesh: Mesh, command: str) -> None:
    if mesh.shape.get("pipe", 1) > 1:
        raise ValueError(
            f"--mesh pipe={mesh.shape['pipe']}: {command} computes no gradients, so it "
            "has no use for a pipeline. Give these devices to fsdp or tensor."
        )
