"""The command `meshloom generate`: continues a text with a trained model."""

import argparse
import sys
from pathlib import Path

from .devices import use_compilation_cache
from .flags import command


def add(commands) -> None:
    """Adds `generate` to the commands."""
    parser = command(
        commands, "generate", _generate, "continue a text with a trained model"
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=256, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 picks the likeliest token"
    )
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--step", type=int, metavar="N", help="default: the published weights"
    )
    parser.add_argument(
        "--mesh",
        default="fsdp=-1",
        metavar="SIZES",
        help="how to shard the model over this machine's devices; default: fsdp=-1",
    )


def _generate(args: argparse.Namespace) -> None:
    import jax

    from ...sharding import MeshSpec
    from ..checkpoint import manager
    from ..config import files as config_files
    from ..program.computation import layout_of
    from ..record import run_folder
    from ..run import sampling
    from ..run.train import Config

    if args.tokens < 1:
        raise ValueError(f"--tokens must be >= 1, got {args.tokens}")
    folder = run_folder.RunFolder(args.run_folder)
    text = folder.path / run_folder.CONFIG_GIN
    steps = manager.committed_steps(folder.checkpoints)
    if not text.exists() or not steps:
        raise ValueError(
            f"{folder.path} does not contain a trained model: expected "
            f"{run_folder.CONFIG_GIN} and a checkpoint. Give the folder of a run that "
            "has saved one."
        )
    step = _published(folder.path, steps) if args.step is None else args.step
    if step not in steps:
        raise ValueError(
            f"{folder.path} has no checkpoint of step {step}; it has "
            f"{', '.join(map(str, steps))}. Pass one of these as --step, or omit it."
        )
    use_compilation_cache()
    config = config_files.load([str(text)], root=Config).config
    mesh = MeshSpec.parse(args.mesh).make(jax.local_devices())
    layout, _ = layout_of(config, mesh)
    params = manager.restore_params(
        folder.checkpoints, step, layout.abstract.params, layout.params.shardings(mesh)
    )
    print(
        sampling.sample(
            config,
            mesh,
            params,
            args.prompt,
            args.tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
        )
    )


def _published(folder: Path, steps: list[int]) -> int:
    """Returns the step of the published weights; the newest if there are none."""
    from ..record import published

    newest = published.read(folder)
    if newest is None or newest.step in steps:
        return steps[-1] if newest is None else newest.step
    print(
        f"note: {folder / published.FILE} names step {newest.step}, which is gone; "
        f"using step {steps[-1]}",
        file=sys.stderr,
    )
    return steps[-1]
