"""`meshloom launch local`: several processes on this machine, supervised."""

import argparse
import os

from .. import flags, fleet_flags, gpus
from ..logs import Logs
from ..target import (
    Attempt,
    Command,
    Launcher,
    job_environment,
    local_host,
    own_variables,
)

SUMMARY = (
    "run a command as several processes on this machine, and restart all of them when "
    "one dies or they get stuck"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="required without --learners; with it, those of each learner; default: 1",
    )
    parser.add_argument(
        "--min-processes",
        type=int,
        metavar="N",
        help="if a worker keeps dying, continue with fewer processes, but at least N; "
        "default: never shrink",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="let every worker import for itself; by default the workers of train are "
        "forked from one process that has imported everything (on Linux)",
    )
    fleet_flags.add(parser, is_on_hosts=False)
    flags.add_supervision(parser)
    flags.add_command(parser)


def launch(args: argparse.Namespace) -> int:
    """Runs a `meshloom` command as every process of a job; returns the exit code."""
    if fleet_flags.is_given(args):
        return _launch_fleet(args)
    if args.processes is None:
        raise ValueError("--processes is required without --learners")
    target = Local(flags.process(args), cpu_devices=flags.cpu_devices(args))
    if not args.cold:
        target.warm = flags.warm_process(args)
    return flags.supervise(target, args, args.processes)


def _launch_fleet(args: argparse.Namespace) -> int:
    processes = 1 if args.processes is None else args.processes
    own = [f"--processes={processes}", *fleet_flags.given(args, "min_processes")]
    own += ["--cold"] * args.cold
    shares = []
    for number in range(args.learners):
        installed = gpus.num_installed()
        mine = gpus.share(os.environ, installed, number, args.learners)
        shares.append(
            fleet_flags.Share(own, {} if mine is None else {gpus.VARIABLE: mine})
        )
    return fleet_flags.launch(args, "local", shares, processes=processes)


class Local(Launcher):
    """Processes on this machine, each a child of the supervisor."""

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
    """Returns the environment of each process of an unsupervised job."""
    attempt = Attempt(1, processes)
    job = job_environment(attempt, f"127.0.0.1:{port}", cpu_devices=cpu_devices)
    numbers = ({"MESHLOOM_PROCESS_ID": str(n)} for n in range(processes))
    return [{**os.environ, **job, **number} for number in numbers]
