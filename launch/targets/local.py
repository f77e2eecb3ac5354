"""`meshloom launch local`: a job of several processes on this machine, supervised."""

import argparse
import os

from .. import flags
from ..logs import Logs
from ..target import (
    Attempt,
    Command,
    Target,
    job_environment,
    local_host,
    own_variables,
)

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
        "--cold",
        action="store_true",
        help="let every worker import by itself; otherwise those of train are forked "
        "from one process that has imported everything (on Linux)",
    )
    flags.add_supervision(parser)
    flags.add_command(parser)


def launch(args: argparse.Namespace) -> int:
    """Runs a command of `meshloom` as every process of a job; the exit status."""
    target = Local(flags.process(args), cpu_devices=flags.cpu_devices(args))
    if not args.cold:
        target.warm = flags.warm_process(args)
    return flags.supervise(target, args, args.processes)


class Local(Target):
    """Processes of this machine, each a child of the supervisor."""

    def hosts(self, processes: int) -> list[str]:
        return [local_host()] * processes

    def start(self, attempt: Attempt, logs: Logs) -> list[Command]:
        job = {**os.environ, **self.environment(attempt)}
        return [
            Command(
                f"worker {number}", self.command, {**job, **own_variables(number, logs)}
            )
            for number in range(attempt.processes)
        ]


def environments(
    processes: int, port: int, *, cpu_devices: int | None = None
) -> list[dict[str, str]]:
    """What each process of a job that nobody supervises is told."""
    attempt = Attempt(1, processes)
    job = job_environment(attempt, f"127.0.0.1:{port}", cpu_devices=cpu_devices)
    numbers = ({"MESHLOOM_PROCESS_ID": str(n)} for n in range(processes))
    return [{**os.environ, **job, **number} for number in numbers]
