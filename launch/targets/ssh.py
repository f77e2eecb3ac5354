"""`meshloom launch ssh`: processes on a list of hosts, without a scheduler."""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import flags, fleet_flags
from ..logs import Logs
from ..target import Attempt, Command, Launcher, carried, local_host, own_variables

SUMMARY = (
    "run a command on a list of hosts over ssh, and restart all processes when one "
    "dies, gets stuck, or its host is gone"
)
REMOTE = Path(__file__).parent.with_name("remote.py")
# Never ask for a password; notice within 15 s that a host is gone.
OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts",
        required=True,
        metavar="A,B,...",
        help="names that all of these hosts can resolve; process 0 runs on the first",
    )
    parser.add_argument(
        "--processes-per-host", type=int, default=1, metavar="N", help="default: 1"
    )
    parser.add_argument(
        "--ssh",
        default="ssh",
        metavar="COMMAND",
        help="with options of your own, such as --ssh 'ssh -p 2222 -l me'",
    )
    parser.add_argument(
        "--silence-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="a host ends its processes after S seconds without contact; default: 30",
    )
    flags.add_carried(parser)
    fleet_flags.add(parser)
    flags.add_supervision(parser)
    flags.add_command(parser)


def launch(args: argparse.Namespace) -> int:
    hosts = args.hosts.split(",")
    if not all(hosts) or len(set(hosts)) < len(hosts):
        raise ValueError(
            f"--hosts is {args.hosts!r}; expected distinct names, such as --hosts a,b"
        )
    if "@" in args.hosts:
        raise ValueError(
            f"--hosts is {args.hosts!r}; the processes use these names too, so "
            "give the user with --ssh 'ssh -l USER' or in ~/.ssh/config"
        )
    if args.processes_per_host < 1:
        raise ValueError(
            f"--processes-per-host must be at least 1, got {args.processes_per_host}"
        )
    ssh = shlex.split(args.ssh)
    if not ssh or shutil.which(ssh[0]) is None:
        raise ValueError(f"--ssh {args.ssh!r}: command not found")
    if fleet_flags.is_given(args):
        return _launch_fleet(args, hosts)
    target = Ssh(
        flags.process(args),
        [host for host in hosts for _ in range(args.processes_per_host)],
        ssh=ssh,
        silence=args.silence_seconds,
        env=args.env,
        cpu_devices=flags.cpu_devices(args),
    )
    return flags.supervise(target, args, target.most)


def _launch_fleet(args: argparse.Namespace, hosts: list[str]) -> int:
    """Runs the service here, and each learner on its share of the hosts."""
    groups = fleet_flags.divide("hosts", hosts, args.learners)
    own = [f"--env={name}" for name in args.env]
    for name in ("processes_per_host", "ssh", "silence_seconds"):
        own += fleet_flags.given(args, name)
    shares = [fleet_flags.Share([f"--hosts={','.join(g)}", *own]) for g in groups]
    processes = len(groups[0]) * args.processes_per_host
    return fleet_flags.launch(args, "ssh", shares, processes=processes, hosts=hosts)


class Ssh(Launcher):
    """Processes that live as long as our ssh connection to their host.

    Meshloom must be installed at the same path on every host, for instance on a shared
    file system or from the same image.

    Args:
      slots: the host of each process.
    """

    most: int

    def __init__(
        self,
        command: Sequence[str],
        slots: Sequence[str],
        *,
        ssh: Sequence[str] = ("ssh",),
        silence: float = 30.0,
        env: Sequence[str] = (),
        cpu_devices: int | None = None,
    ):
        super().__init__(command, cpu_devices=cpu_devices)
        self._slots, self._ssh, self._silence = tuple(slots), tuple(ssh), silence
        self._env = tuple(env)
        self.most = len(slots)

    def hosts(self, processes: int) -> list[str]:
        return list(self._slots[:processes])

    def start(self, attempt: Attempt, logs: Logs) -> list[Command]:
        hosts = self.hosts(attempt.processes)
        job = {**os.environ, **self.environment(attempt)}
        return [
            self._command(number, host, {**job, **own_variables(number, logs)})
            for number, host in enumerate(hosts)
        ]

    def _command(self, number: int, host: str, env: dict[str, str]) -> Command:
        name = f"worker {number}"
        if host == local_host():
            return Command(name, self.command, env, host=host)
        far = shlex.join([sys.executable, "-I", "-S", str(REMOTE), "far"])
        names = ",".join(carried(env, self._env))
        argv = [
            *(sys.executable, "-I", "-S", str(REMOTE), "near", host),
            *(str(self._silence), names, *self.command, "--"),
            *(*self._ssh, *OPTIONS, host, far),
        ]
        return Command(name, argv, env, host=host)
