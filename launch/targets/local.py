"""`meshloom launch local`: a job of several processes on this machine, supervised."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

SUMMARY = (
    "run a command as several processes on this machine, and restart all of them when "
    "one dies or they get stuck"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, required=True, metavar="N")
    parser.add_argument(
        "--min-processes",
        type=int,
        metavar="N",
        help="go on with fewer, but not fewer than N, when a worker cannot come back; "
        "default: always all",
    )
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
    parser.add_argument(
        "command",
        nargs="+",
        metavar="COMMAND",
        help="of meshloom, after --, for instance -- train --steps 100",
    )


def launch(args: argparse.Namespace) -> int:
    """Runs a command of `meshloom` as every process of a job; the exit status."""
    from ..settings import Settings
    from ..supervisor import Supervisor

    given = _flags_of(args.command)
    cpu_devices = args.cpu_devices
    if cpu_devices is None:
        # The number of threads depends on it, and must be set before Python starts.
        cpu_devices = given.cpu_devices
    settings = Settings(
        processes=args.processes,
        min_processes=args.min_processes,
        cpu_devices=cpu_devices,
        max_restarts=args.max_restarts,
        stall_seconds=args.stall_seconds,
        start_seconds=args.start_seconds,
        grace_seconds=args.grace_seconds,
    )
    # -P: the folder we are in is no place to import from, as for the installed command.
    command = [sys.executable, "-P", "-m", "meshloom.trainer.cli", *args.command]
    folder = args.logs or _log_folder(args.command, given)
    return Supervisor(command, folder, settings).run()


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


def _log_folder(command: Sequence[str], given: argparse.Namespace) -> Path:
    """`logs` in the run folder of a training; for other commands runs/logs."""
    if given.workdir is None:
        if command[0] != "train":
            return Path("runs", "logs")
        return Path("runs", Path((given.config or ["default"])[-1]).stem, "logs")
    if "://" in given.workdir:
        raise ValueError(
            f"the run folder {given.workdir} is not on this machine, but the "
            "supervisor's logs must be. Name a folder for them with --logs."
        )
    return Path(given.workdir, "logs")
