"""`meshloom launch slurm`: a Slurm job, supervised from its first node.

Outside an allocation it submits a script whose only command is `meshloom launch slurm`
again. Inside one, it runs the processes with srun under the supervisor, which restarts
them within the allocation. A job that was told to stop and has saved is requeued.
"""

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from .. import flags, fleet_flags
from ..exit_codes import PREEMPTED
from ..logs import Logs, say
from ..schedulers import expand
from ..target import Attempt, Command, Launcher, rank_command

SUMMARY = (
    "submit a command as a Slurm job, or inside an allocation run it with srun, and "
    "restart all processes when one dies or they get stuck"
)
# Options of sbatch, by our flag; they make no sense inside an allocation.
OF_THE_JOB = {
    "nodes": ("N", "number of nodes; each runs --tasks-per-node processes"),
    "time": ("TIME", "time limit, such as 2-00:00:00"),
    "partition": ("NAME", ""),
    "account": ("NAME", ""),
    "qos": ("NAME", ""),
    "constraint": ("FEATURES", ""),
    "job_name": ("NAME", "default: meshloom"),
}
# The job is warned this long before its time limit, in addition to --grace-seconds.
SPARE_SECONDS = 30
# Slurm kills a job that it requeues within its KillWait, 30 s by default.
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
        help="another option for sbatch, such as --sbatch-option=--reservation=r; may "
        "be repeated",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the job, or NAME alone to pass on one that is set here "
        "(always do that for secrets); may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script, submit nothing"
    )
    parser.add_argument(
        "--detach", action="store_true", help="submit the job without following it"
    )
    parser.add_argument(
        "--nodelist",
        metavar="NODES",
        help="inside an allocation: use only these of its nodes",
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
        help="another option for srun, such as --srun-option=--network=ib; may be "
        "repeated",
    )
    parser.add_argument(
        "--no-requeue",
        action="store_true",
        help="do not requeue the job when it is preempted or out of time",
    )
    fleet_flags.add(parser)
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
    is_fleet = fleet_flags.is_given(args)
    if job := os.environ.get("SLURM_JOB_ID"):
        return _inside(args, job, is_fleet)
    if args.nodelist is not None:
        raise ValueError(
            "--nodelist is for inside an allocation; for a new job use "
            f"--sbatch-option=--nodelist={args.nodelist}"
        )
    from .slurm_job import SlurmJob

    return SlurmJob(args).run()


def _inside(args: argparse.Namespace, job: str, is_fleet: bool) -> int:
    given = [name for name in OF_THE_JOB if getattr(args, name) is not None]
    given += [
        n for n in ("env", "sbatch_option", "dry_run", "detach") if getattr(args, n)
    ]
    if given:
        raise ValueError(
            f"--{given[0].replace('_', '-')} is for a new job, but this is inside job "
            f"{job} and uses its nodes. Leave the flag out, or exit the job."
        )
    if "SLURM_JOB_NODELIST" not in os.environ:
        raise ValueError(
            f"SLURM_JOB_ID is {job}, but SLURM_JOB_NODELIST is not set. Unset the "
            "first to submit a job, or run this in a shell that salloc started."
        )
    nodes = _nodes(args, expand(os.environ["SLURM_JOB_NODELIST"]), job)
    if is_fleet:
        status = _launch_fleet(args, nodes)
    else:
        target = SlurmStep(
            flags.process(args),
            nodes,
            args.tasks_per_node,
            options=step_options(args),
            cpu_devices=flags.cpu_devices(args),
        )
        status = flags.supervise(target, args, target.most)
    if status == PREEMPTED and not args.no_requeue:
        _requeue(job)
    return status


def _nodes(args: argparse.Namespace, nodes: list[str], job: str) -> list[str]:
    if args.nodelist is None:
        return nodes
    chosen = expand(args.nodelist)
    if missing := [node for node in chosen if node not in nodes]:
        raise ValueError(
            f"--nodelist has {missing[0]}, which is not a node of job {job}; expected "
            f"some of {','.join(nodes)}"
        )
    return chosen


def _launch_fleet(args: argparse.Namespace, nodes: list[str]) -> int:
    """Runs the service here, and each learner on its share of the nodes."""
    groups = fleet_flags.divide("nodes", nodes, args.learners)
    own = ["--no-requeue", *[f"--srun-option={o}" for o in args.srun_option]]
    for name in ("tasks_per_node", "gpus_per_node", "cpus_per_task"):
        own += fleet_flags.given(args, name)
    for name in ("container_image", "container_mounts"):
        own += fleet_flags.given(args, name)
    shares = [fleet_flags.Share([f"--nodelist={','.join(g)}", *own]) for g in groups]
    processes = len(groups[0]) * args.tasks_per_node
    return fleet_flags.launch(args, "slurm", shares, processes=processes, hosts=nodes)


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


class SlurmStep(Launcher):
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
            f"--nodelist={','.join(dict.fromkeys(hosts))}",
            # A task that fails ends the others; our own guard writes the logs.
            *("--kill-on-bad-exit=1", "--mpi=none", "--cpu-bind=none", "--export=ALL"),
            *(*self._options, *rank_command(self.command, logs)),
        ]
        # srun forwards this signal; on SIGTERM it has all tasks killed.
        return [Command("srun", argv, env, signal.SIGUSR1)]


def ask(*argv: str) -> str:
    """Runs a Slurm command and returns its output."""
    try:
        found = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise ValueError(
            f"{argv[0]}: command not found. `meshloom launch slurm` needs Slurm's "
            "commands; on one machine use `meshloom launch local`."
        ) from None
    if found.returncode:
        message = " ".join(found.stderr.split()) or f"exit code {found.returncode}"
        raise ValueError(f"{' '.join(argv[:3])}: {message}")
    return found.stdout.strip()


def facts(job: str) -> dict[str, str]:
    """Returns what Slurm knows about a job."""
    words = ask("scontrol", "show", "job", "-o", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _requeue(job: str) -> None:
    """Requeues a job that was told to stop, unless Slurm is already ending it."""
    if (state := facts(job)["JobState"]) != "RUNNING":
        say(f"job {job} is {state}; Slurm decides what happens next")
        return
    say(f"requeueing job {job}")
    ask("scontrol", "requeue", job)
    # Slurm ends us now. If we exited first, it might mark the job as failed.
    time.sleep(END_SECONDS)
