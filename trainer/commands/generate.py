"""The command `meshloom generate`: continues a text with a trained model."""

import argparse
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
    from ..config import files as config_files
    from ..program.computation import layout_of
    from ..record.run_folder import CONFIG_GIN
    from ..run import sampling, trained
    from ..run.train import Config

    if args.tokens < 1:
        raise ValueError(f"--tokens must be >= 1, got {args.tokens}")
    step = trained.NEWEST if args.step is None else str(args.step)
    stored = trained.find(args.run_folder, step)
    text = str(args.run_folder / CONFIG_GIN)
    use_compilation_cache()
    config = config_files.load([text], root=Config).config
    mesh = MeshSpec.parse(args.mesh).make(jax.local_devices())
    layout, _ = layout_of(config, mesh)
    state = trained.restore(stored, layout, mesh)
    print(
        sampling.sample(
            config,
            mesh,
            state.params,
            args.prompt,
            args.tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
            tokenizer=trained.tokenizer(args.run_folder),
            variables=state.variables,
        )
    )
