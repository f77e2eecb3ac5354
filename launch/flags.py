"""Flags that the targets of `meshloom launch` share."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .target import Target


def add_supervision(parser: argparse.ArgumentParser) -> None:
    """How the processes are watched and brought back."""
    parser.add_argument(
        "--cpu-devices",
        type=int,
        metavar="N",
        help="run on the CPU, with N devices in each process",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=5,
        metavar="N",
        help="how many may follow each other without progress; default: 5",
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        metavar="S",
        help="restart after S seconds without progress; default: 90, or 15 times the "
        "median between two reports if that is more",
    )
    parser.add_argument(
        "--start-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="the same before the first step, which is compiled; default: 600",
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="for workers to save when told to stop; default: 60",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="default: logs in the run folder"
    )


def add_carried(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable that processes on other hosts get too; may be repeated. "
        "Those of jax, XLA, NCCL and Meshloom always are.",
    )


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs="+",
        metavar="COMMAND",
        help="of meshloom, after --, for instance -- train --steps 100",
    )


def supervise(target: Target, args: argparse.Namespace, processes: int) -> int:
    """Runs a job until it is done; the exit status."""
    from .settings import Settings
    from .supervisor import Supervisor

    settings = Settings(
        processes=processes,
        min_processes=getattr(args, "min_processes", None),  # not every target shrinks
        max_restarts=args.max_restarts,
        stall_seconds=args.stall_seconds,
        start_seconds=args.start_seconds,
        grace_seconds=args.grace_seconds,
    )
    return Supervisor(target, log_folder(args), settings).run()


def process(args: argparse.Namespace) -> list[str]:
    """The command line of each process."""
    # -P: the folder we are in is no place to import from, as for the installed command.
    return [sys.executable, "-P", "-m", "meshloom.trainer.cli", *args.command]


def warm_process(args: argparse.Namespace) -> list[str] | None:
    """The command line of what processes can be forked from; None for none."""
    if args.command[0] != "train":
        return None
    return [sys.executable, "-P", "-m", "meshloom.trainer.warm", *args.command]


def cpu_devices(args: argparse.Namespace) -> int | None:
    """As given to us, or to the command of the workers.

    The number of threads depends on it, and must be set before Python starts.
    """
    if args.cpu_devices is not None:
        if args.cpu_devices < 1:
            raise ValueError(
                f"--cpu-devices must be at least 1, got {args.cpu_devices}"
            )
        return args.cpu_devices
    return _flags_of(args.command).cpu_devices


def log_folder(args: argparse.Namespace) -> Path:
    """`logs` in the run folder of a training; for other commands runs/logs."""
    if args.logs is not None:
        return args.logs
    given = _flags_of(args.command)
    if given.workdir is None:
        if args.command[0] != "train":
            return Path("runs", "logs")
        return Path("runs", Path((given.config or ["default"])[-1]).stem, "logs")
    if "://" in given.workdir:
        raise ValueError(
            f"the run folder {given.workdir} is not on this machine, but the "
            "supervisor's logs must be. Name a folder for them with --logs."
        )
    return Path(given.workdir, "logs")


def _flags_of(command: Sequence[str]) -> argparse.Namespace:
    """What of the workers' command concerns us; its own parser checks the rest."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--workdir")
    parser.add_argument("--config", action="append")
    parser.add_argument("--cpu-devices")
    known, _ = parser.parse_known_args(command)
    count = known.cpu_devices
    known.cpu_devices = int(count) if count and count.isdigit() else None
    return known
