"""`meshloom launch slurm`: a job of Slurm's, supervised on its first node.

Outside of an allocation it submits a script whose only command is `meshloom launch
slurm` again. Inside one, that runs the processes by srun under the supervisor, which
restarts them within the allocation, and puts the job back into the queue where it was
told to stop and has saved.
"""

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from .. import flags
from ..exit_codes import PREEMPTED
from ..logs import Logs, say
from ..schedulers import expand
from ..target import Attempt, Command, Target, rank_command

SUMMARY = (
    "submit a command as a job of Slurm, or inside an allocation run it by srun, and "
    "restart all processes when one dies or they get stuck"
)
# Slurm's own words, by the flag of ours; the job's, so of no use inside an allocation.
OF_THE_JOB = {
    "nodes": ("N", "how many; each runs --tasks-per-node processes"),
    "time": ("TIME", "limit, such as 2-00:00:00"),
    "partition": ("NAME", ""),
    "account": ("NAME", ""),
    "qos": ("NAME", ""),
    "constraint": ("FEATURES", ""),
    "job_name": ("NAME", "default: meshloom"),
}
# Before the limit of time the job is told so early, beyond the time that it may take.
SPARE_SECONDS = 30
# Slurm ends a job that it requeues within its KillWait, which is 30 by default.
END_SECONDS = 120


def add_flags(parser: argparse.ArgumentParser) -> None:
    for name, (metavar, help) in OF_THE_JOB.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, metavar=metavar, help=help or f"as in sbatch {flag}")
    parser.add_argument(
        "--sbatch-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more for sbatch, such as --sbatch-option=--reservation=r; may be "
        "repeated",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the job, or NAME alone for one that is set here (secrets "
        "always so, they are never written); may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script, submit nothing"
    )
    parser.add_argument(
        "--detach", action="store_true", help="submit, and do not follow the job"
    )
    parser.add_argument("--tasks-per-node", type=int, default=1, metavar="N")
    parser.add_argument("--gpus-per-node", type=int, metavar="N")
    parser.add_argument("--cpus-per-task", type=int, metavar="N")
    parser.add_argument(
        "--container-image", metavar="IMAGE", help="for Slurm with pyxis"
    )
    parser.add_argument("--container-mounts", metavar="FROM:TO,...")
    parser.add_argument(
        "--srun-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more for srun, such as --srun-option=--network=ib; may be repeated",
    )
    parser.add_argument(
        "--no-requeue",
        action="store_true",
        help="do not go back into the queue when preempted or out of time",
    )
    flags.add_supervision(parser)
    flags.add_command(parser)


def launch(args: argparse.Namespace) -> int:
    for name in ("tasks_per_node", "gpus_per_node", "cpus_per_task"):
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if (args.gpus_per_node or 0) % args.tasks_per_node:
        raise ValueError(
            f"--gpus-per-node {args.gpus_per_node} cannot be divided among "
            f"--tasks-per-node {args.tasks_per_node} processes"
        )
    if job := os.environ.get("SLURM_JOB_ID"):
        return _inside(args, job)
    from .slurm_job import SlurmJob

    return SlurmJob(args).run()


def _inside(args: argparse.Namespace, job: str) -> int:
    given = [name for name in OF_THE_JOB if getattr(args, name) is not None]
    given += [
        n for n in ("env", "sbatch_option", "dry_run", "detach") if getattr(args, n)
    ]
    if given:
        raise ValueError(
            f"--{given[0].replace('_', '-')} is for a new job, but this is inside job "
            f"{job}, whose nodes are used. Leave it out, or leave the job."
        )
    if "SLURM_JOB_NODELIST" not in os.environ:
        raise ValueError(
            f"SLURM_JOB_ID is {job}, but SLURM_JOB_NODELIST is not set. Unset the "
            "first to submit a job, or start this in a shell of salloc."
        )
    target = SlurmStep(
        flags.process(args),
        expand(os.environ["SLURM_JOB_NODELIST"]),
        args.tasks_per_node,
        options=step_options(args),
        cpu_devices=flags.cpu_devices(args),
    )
    status = flags.supervise(target, args, target.most)
    if status == PREEMPTED and not args.no_requeue:
        _requeue(job)
    return status


def step_options(args: argparse.Namespace) -> list[str]:
    options = []
    if args.gpus_per_node is not None:
        options.append(f"--gpus-per-task={args.gpus_per_node // args.tasks_per_node}")
    if args.cpus_per_task is not None:
        options.append(f"--cpus-per-task={args.cpus_per_task}")
    if args.container_image is not None:
        options.append(f"--container-image={args.container_image}")
    if args.container_mounts is not None:
        options.append(f"--container-mounts={args.container_mounts}")
    return options + args.srun_option


class SlurmStep(Target):
    """One srun that starts all processes, on all nodes of the allocation."""

    most: int

    def __init__(
        self,
        command: Sequence[str],
        nodes: Sequence[str],
        tasks_per_node: int,
        *,
        options: Sequence[str] = (),
        cpu_devices: int | None = None,
    ):
        super().__init__(command, cpu_devices=cpu_devices)
        self._nodes, self._each = tuple(nodes), tasks_per_node
        self._options = tuple(options)
        self.most = len(nodes) * tasks_per_node

    def hosts(self, processes: int) -> list[str]:
        slots = [node for node in self._nodes for _ in range(self._each)]
        return slots[:processes]

    def start(self, attempt: Attempt, logs: Logs) -> list[Command]:
        hosts = self.hosts(attempt.processes)
        env = {**os.environ, **self.environment(attempt)}
        argv = [
            *("srun", f"--nodes={len(set(hosts))}", f"--ntasks={len(hosts)}"),
            *(f"--ntasks-per-node={self._each}", "--distribution=block"),
            # One that fails ends the others; our own guard writes the logs.
            *("--kill-on-bad-exit=1", "--mpi=none", "--cpu-bind=none", "--export=ALL"),
            *(*self._options, *rank_command(self.command, logs)),
        ]
        # srun passes this one on, and has everybody killed on SIGTERM.
        return [Command("srun", argv, env, signal.SIGUSR1)]


def ask(*argv: str) -> str:
    """What a command of Slurm's answers."""
    try:
        found = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise ValueError(
            f"{argv[0]}: command not found. `meshloom launch slurm` needs Slurm's "
            "commands; on one machine use `meshloom launch local`."
        ) from None
    if found.returncode:
        words = " ".join(found.stderr.split()) or f"status {found.returncode}"
        raise ValueError(f"{' '.join(argv[:3])}: {words}")
    return found.stdout.strip()


def facts(job: str) -> dict[str, str]:
    """What Slurm knows of a job."""
    words = ask("scontrol", "show", "job", "-o", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _requeue(job: str) -> None:
    """Puts a job that was told of its end back; one that Slurm ends itself is left."""
    if (state := facts(job)["JobState"]) != "RUNNING":
        say(f"job {job} is {state}; what follows is Slurm's to decide")
        return
    say(f"putting job {job} back into the queue")
    ask("scontrol", "requeue", job)
    # Slurm ends us now. If we ended by ourselves, it might take the job for failed.
    time.sleep(END_SECONDS)
