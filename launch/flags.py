"""Flags shared by the targets of `meshloom launch`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .target import Launcher


def add_supervision(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for watching and restarting processes."""
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
        help="restarts in a row without progress; default: 5",
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        metavar="S",
        help="restart after S seconds without progress; default: 90, or 15 times the "
        "median time between two reports if that is more",
    )
    parser.add_argument(
        "--start-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="the same before the first step, which compiles; default: 600",
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="how long workers may take to save when stopped; default: 60",
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
        help="also pass this variable to other hosts; may be repeated. Those of jax, "
        "XLA, NCCL and Meshloom are always passed.",
    )


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs="+",
        metavar="COMMAND",
        help="a meshloom command, after --, such as -- train --steps 100",
    )


def supervise(target: Launcher, args: argparse.Namespace, processes: int) -> int:
    """Runs a job until it is done; returns the exit code."""
    from .settings import Settings
    from .supervisor import Supervisor

    settings = Settings(
        processes=processes,
        min_processes=getattr(
            args, "min_processes", None
        ),  # not every target can shrink
        max_restarts=args.max_restarts,
        stall_seconds=args.stall_seconds,
        start_seconds=args.start_seconds,
        grace_seconds=args.grace_seconds,
    )
    return Supervisor(target, log_folder(args), settings).run()


def process(args: argparse.Namespace) -> list[str]:
    """Returns the command line of each process."""
    # -P: do not import from the current folder, just like the installed command.
    return [sys.executable, "-P", "-m", "meshloom.trainer.cli", *args.command]


def warm_process(args: argparse.Namespace) -> list[str] | None:
    """Returns the command line of the process to fork workers from, if any."""
    if args.command[0] != "train":
        return None
    return [sys.executable, "-P", "-m", "meshloom.trainer.warm", *args.command]


def cpu_devices(args: argparse.Namespace) -> int | None:
    """Returns --cpu-devices, as given to us or to the workers' command.

    The number of threads depends on it, and must be set before Python starts.
    """
    if args.cpu_devices is not None:
        if args.cpu_devices < 1:
            raise ValueError(f"--cpu-devices must be >= 1, got {args.cpu_devices}")
        return args.cpu_devices
    return _flags_of(args.command).cpu_devices


def log_folder(args: argparse.Namespace) -> Path:
    """Returns `logs` in the run folder of `train`; runs/logs for other commands."""
    if args.logs is not None:
        return args.logs
    folder = run_folder(args.command)
    if "://" in folder:
        raise ValueError(
            f"the run folder {folder} is not on this machine, but the "
            "supervisor's logs must be. Name a folder for them with --logs."
        )
    return Path(folder, "logs")


def run_folder(command: Sequence[str]) -> str:
    """Returns the run folder of `train`, which may be a URL; else `runs`."""
    given = _flags_of(command)
    if given.workdir is not None:
        return given.workdir
    if command[0] != "train":
        return "runs"
    return str(Path("runs", Path((given.config or ["default"])[-1]).stem))


def _flags_of(command: Sequence[str]) -> argparse.Namespace:
    """Parses the flags we need of the workers' command; it checks the rest itself."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--workdir")
    parser.add_argument("--config", action="append")
    parser.add_argument("--cpu-devices")
    known, _ = parser.parse_known_args(command)
    count = known.cpu_devices
    known.cpu_devices = int(count) if count and count.isdigit() else None
    return known
