"""The command `meshloom ckpt`: inspects, verifies, compares and exports checkpoints."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

from .flags import command

# Exit status of `verify` and `diff` if anything differs.
DIFFERS = 1


def add(commands) -> None:
    """Adds `ckpt` to the commands."""
    parser = commands.add_parser(
        "ckpt", help="inspect, verify, compare and export checkpoints"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, run: Callable, help: str) -> argparse.ArgumentParser:
        parser = command(actions, name, run, help)
        parser.add_argument(
            "run_folder",
            metavar="RUN",
            help="a run folder, the folder of one step, or gs://...",
        )
        return parser

    def add_step(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--step", type=int, metavar="N", help="default: the newest committed step"
        )

    action("ls", _ls, "list the checkpoints of a run, committed or not")
    add_step(
        action(
            "inspect", _inspect, "show the arrays, digests and origin of a checkpoint"
        )
    )
    verify = action("verify", _verify, "recompute digests; status 1 if any differs")
    verify.add_argument(
        "--step", type=int, metavar="N", help="default: every committed step"
    )
    diff = action("diff", _diff, "compare two, array by array; status 1 if they differ")
    diff.add_argument("other", metavar="OTHER")
    add_step(diff)
    diff.add_argument("--other-step", type=int, metavar="N")
    export = action("export", _export, "write a checkpoint as a safetensors file")
    add_step(export)
    export.add_argument("--output", type=Path, required=True, metavar="FILE")
    export.add_argument(
        "--all", action="store_true", help="include the optimizer state"
    )


def _tools():
    # Orbax warns that a part of a checkpoint is not a checkpoint by itself.
    logging.getLogger("absl").setLevel(logging.ERROR)
    import jax

    jax.config.update("jax_platforms", "cpu")
    from ..checkpoint import inspect

    return inspect


def _ls(args: argparse.Namespace) -> None:
    print(_tools().ls(args.run_folder))


def _inspect(args: argparse.Namespace) -> None:
    tools = _tools()
    print(tools.inspect(tools.Stored.find(args.run_folder, args.step)))


def _verify(args: argparse.Namespace) -> int:
    tools = _tools()
    newest = tools.Stored.find(args.run_folder, args.step)
    steps = [newest.step]
    if args.step is None and not args.run_folder.rstrip("/").split("/")[-1].isdigit():
        steps = tools.committed_steps(newest.folder)
    failed = False
    for step in steps:
        stored = tools.Stored(newest.folder, step)
        if lines := tools.verify(stored):
            failed = True
            print(f"step {step}: damaged")
            print("\n".join(f"  {line}" for line in lines))
        else:
            print(f"step {step}: {len(stored.manifest()['arrays'])} arrays as saved")
    return DIFFERS if failed else 0


def _diff(args: argparse.Namespace) -> int:
    tools = _tools()
    a = tools.Stored.find(args.run_folder, args.step)
    b = tools.Stored.find(args.other, args.other_step)
    lines = tools.diff(a, b)
    print("\n".join(lines) or "No difference.")
    return DIFFERS if lines else 0


def _export(args: argparse.Namespace) -> None:
    tools = _tools()
    stored = tools.Stored.find(args.run_folder, args.step)
    count = tools.export(stored, args.output, params_only=not args.all)
    print(f"{count} arrays of step {stored.step} written to {args.output}")
