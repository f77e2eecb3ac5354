"""A Slurm job: writes its script, submits, follows and stops it."""

import argparse
import contextlib
import importlib.resources
import os
import shlex
import string
import sys
import time
from pathlib import Path

from .. import flags
from ..exit_codes import GAVE_UP
from ..logs import offer, say
from ..masking import looks_secret
from ..target import Submitted
from . import slurm

POLL_SECONDS = 2.0
POLLS_ENDED = 3  # a job that is being requeued is FAILED for a moment
FAILURES = 30  # queries in a row that may fail while a job is followed
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
ENDED += ("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED")


class SlurmJob(Submitted):
    """A job that runs `meshloom launch slurm` on its first node."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._job = args, ""
        self._logs = flags.log_folder(args).absolute()
        if args.nodes is None:
            raise ValueError("--nodes is required: the number of nodes")
        if not args.nodes.isdigit() or not int(args.nodes):
            raise ValueError(f"--nodes must be a whole number, got {args.nodes}")

    def run(self) -> int:
        if self._args.dry_run:
            print(self.script(), end="")
            return 0
        self.start()
        say(f"submitted job {self._job}; its log is {self._log(self._job)}")
        if self._args.detach:
            return 0
        try:
            return self.follow()
        except KeyboardInterrupt:
            say(f"job {self._job} keeps running; `scancel {self._job}` ends it")
            raise

    def hosts(self) -> list[str]:
        return []  # Slurm chooses them

    def environment(self) -> dict[str, str]:
        """Returns the variables that are written into the script."""
        found = {}
        for text in self._args.env:
            name, equals, value = text.partition("=")
            if equals and looks_secret(name):
                raise ValueError(
                    f"--env {name}=...: this looks like a secret, and the script would "
                    f"show it. Set it in your environment and pass --env {name}."
                )
            if not equals and name not in os.environ:
                raise ValueError(f"--env {name}: this variable is not set")
            if equals:
                found[name] = value
        return found

    def start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        script = self._logs / "slurm.sh"
        script.write_text(self.script())
        self._job = slurm.ask("sbatch", "--parsable", str(script)).split(";")[0]

    def follow(self) -> int:
        """Shows the job's log and state until it ends; returns its exit code."""
        job, shown, before, failures, ended = self._job, 0, "", 0, 0
        while True:
            try:
                found = slurm.facts(job)
            except ValueError as error:  # Slurm's controller may be restarting
                failures += 1
                if failures > FAILURES:
                    raise
                say(str(error))
                time.sleep(POLL_SECONDS)
                continue
            state, failures = found["JobState"], 0
            if state != before:
                where = f" on {found['NodeList']}" * (state == "RUNNING")
                why = f" ({found['Reason']})" * (state == "PENDING")
                say(f"job {job} is {state}{where}{why}")
                before = state
            with contextlib.suppress(FileNotFoundError):
                shown = _show(self._log(job), shown)
            ended = ended + 1 if state.startswith(ENDED) else 0
            if state == "COMPLETED" or ended > POLLS_ENDED:
                return _status(state, found["ExitCode"])
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        # Slurm sends SIGTERM to all of them, and SIGKILL after its KillWait.
        slurm.ask("scancel", self._job)

    def script(self) -> str:
        template = importlib.resources.files("meshloom.launch") / "templates/slurm.sh"
        exports = [
            f"export {name}={shlex.quote(value)}"
            for name, value in self.environment().items()
        ]
        return string.Template(template.read_text()).substitute(
            directives="\n".join(f"#SBATCH {option}" for option in self._directives()),
            folder=shlex.quote(str(Path.cwd())),
            exports="\n".join(exports) or "# --env adds variables here",
            command=shlex.join(self._command()),
        )

    def _log(self, job: str) -> Path:
        return self._logs / f"slurm-{job}.out"

    def _directives(self) -> list[str]:
        args = self._args
        values = {**vars(args), "job_name": args.job_name or "meshloom"}
        options = [
            f"--{name.replace('_', '-')}={values[name]}"
            for name in slurm.OF_THE_JOB
            if values[name] is not None
        ]
        options.append(f"--ntasks-per-node={args.tasks_per_node}")
        for name in ("gpus_per_node", "cpus_per_task"):
            if values[name] is not None:
                options.append(f"--{name.replace('_', '-')}={values[name]}")
        early = int(args.grace_seconds) + slurm.SPARE_SECONDS
        options += [
            "--no-requeue" if args.no_requeue else "--requeue",
            f"--signal=B:TERM@{early}",
            "--open-mode=append",  # a requeued job continues its log
            f"--output={self._log('%j')}",
        ]
        passed = [text for text in args.env if "=" not in text]
        if passed:
            options.append(f"--export=ALL,{','.join(passed)}")
        return [shlex.quote(option) for option in options + args.sbatch_option]

    def _command(self) -> list[str]:
        """Returns this command for inside the job, without the flags of sbatch."""
        args = self._args
        command = [sys.executable, "-P", "-m", "meshloom.trainer.cli"]
        command += ["launch", "slurm"]
        for name in ("tasks_per_node", "gpus_per_node", "cpus_per_task"):
            command += _given(args, name)
        for name in ("container_image", "container_mounts", "cpu_devices"):
            command += _given(args, name)
        for name in ("max_restarts", "stall_seconds", "start_seconds", "grace_seconds"):
            command += _given(args, name)
        command += [f"--srun-option={option}" for option in args.srun_option]
        command += ["--no-requeue"] * args.no_requeue
        for name in ("learners", "servers", "save_commits", "service_host"):
            command += _given(args, name)
        command += [f"--each={text}" for text in args.each]
        return [*command, f"--logs={self._logs}", "--", *args.command]


def _given(args: argparse.Namespace, name: str) -> list[str]:
    value = getattr(args, name)
    return [] if value is None else [f"--{name.replace('_', '-')}={value}"]


def _show(log: Path, shown: int) -> int:
    """Shows what is new in a log; returns how much of it was shown in all."""
    with open(log, "rb") as file:
        file.seek(shown)
        while piece := file.read(4096):
            while piece:
                taken = offer(sys.stdout.fileno(), piece, seconds=60)
                shown, piece = shown + taken, piece[taken:]
    return shown


def _status(state: str, exit_code: str) -> int:
    """Returns our exit code for a job's final state and Slurm's code:signal."""
    status, _, number = exit_code.partition(":")
    if int(status):
        return int(status)
    if int(number or 0):
        return 128 + int(number)
    return 0 if state == "COMPLETED" else GAVE_UP
