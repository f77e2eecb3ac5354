"""`meshloom launch mpi`: processes started by mpirun, supervised."""

import argparse
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .. import flags, fleet_flags
from ..logs import Logs
from ..target import Attempt, Command, Launcher, carried, local_host, rank_command

SUMMARY = (
    "run a command as several processes with mpirun (Open MPI or MPICH), and restart "
    "all of them when one dies or they get stuck"
)
# Open MPI writes "host slots=4 max_slots=8", MPICH "host:4"; a bare host has one slot.
HOST = re.compile(r"(?P<host>[^\s:#]+)(?::(?P<mpich>\d+))?(?:\s+(?P<rest>.*))?")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="default: one per slot of the hostfile; with --learners, those of each",
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="the hosts and their slots, in the format of either MPI; default: only "
        "this machine",
    )
    parser.add_argument(
        "--mpirun", default="mpirun", metavar="PATH", help="default: mpirun"
    )
    parser.add_argument(
        "--mpi-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option for mpirun, such as --mpi-option=--report-bindings; may "
        "be repeated",
    )
    flags.add_carried(parser)
    fleet_flags.add(parser)
    flags.add_supervision(parser)
    flags.add_command(parser)


def launch(args: argparse.Namespace) -> int:
    slots = [] if args.hostfile is None else read_hostfile(args.hostfile)
    if fleet_flags.is_given(args):
        return _launch_fleet(args, slots)
    processes = args.processes if args.processes is not None else len(slots)
    if not processes:
        raise ValueError("--processes is required without --hostfile")
    target = Mpi(
        flags.process(args),
        slots,
        flavour=find_flavour(args.mpirun),
        mpirun=args.mpirun,
        options=args.mpi_option,
        env=args.env,
        cpu_devices=flags.cpu_devices(args),
    )
    if slots and processes > len(slots):
        raise ValueError(
            f"--processes is {processes}, but {args.hostfile} has slots for only "
            f"{len(slots)}. Add hosts or slots to it."
        )
    return flags.supervise(target, args, processes)


def _launch_fleet(args: argparse.Namespace, slots: list[str]) -> int:
    """Runs the service here, and each learner on its share of the slots."""
    find_flavour(args.mpirun)  # raises before anything is started
    own = [f"--mpi-option={option}" for option in args.mpi_option]
    own += [f"--env={name}" for name in args.env]
    own += fleet_flags.given(args, "mpirun")
    if not slots:
        processes = 1 if args.processes is None else args.processes
        own.append(f"--processes={processes}")
        shares = [fleet_flags.Share(own)] * args.learners
        return fleet_flags.launch(args, "mpi", shares, processes=processes)
    groups = fleet_flags.divide("slots", slots, args.learners)
    processes = len(groups[0]) if args.processes is None else args.processes
    folder = flags.log_folder(args)
    folder.mkdir(parents=True, exist_ok=True)
    shares = []
    for number, group in enumerate(groups):
        path = folder.absolute() / f"hostfile-{number}"
        lines = [f"{host} slots={group.count(host)}\n" for host in dict.fromkeys(group)]
        path.write_text("".join(lines))
        flags_of = [f"--hostfile={path}", f"--processes={processes}", *own]
        shares.append(fleet_flags.Share(flags_of))
    return fleet_flags.launch(args, "mpi", shares, processes=processes, hosts=slots)


class Mpi(Launcher):
    """One mpirun that starts all processes.

    Args:
      slots: the host of each slot, in the order in which mpirun fills them; empty for
        this machine only.
      flavour: "openmpi" or "mpich".
    """

    def __init__(
        self,
        command: Sequence[str],
        slots: Sequence[str] = (),
        *,
        flavour: str,
        mpirun: str = "mpirun",
        options: Sequence[str] = (),
        env: Sequence[str] = (),
        cpu_devices: int | None = None,
    ):
        super().__init__(command, cpu_devices=cpu_devices)
        self._slots, self._flavour, self._mpirun = tuple(slots), flavour, mpirun
        self._options, self._env = tuple(options), tuple(env)
        self.most = len(slots) or None

    def hosts(self, processes: int) -> list[str]:
        if not self._slots:
            return [local_host()] * processes
        return list(self._slots[:processes])

    def start(self, attempt: Attempt, logs: Logs) -> list[Command]:
        env = {**os.environ, **self.environment(attempt)}
        names = carried(env, self._env)
        spell = self._openmpi if self._flavour == "openmpi" else self._mpich
        argv = [
            *(self._mpirun, *spell(attempt.processes, names, logs), *self._options),
            *rank_command(self.command, logs),
        ]
        # Open MPI's mpirun forwards this signal; on SIGTERM it kills everything.
        return [Command("mpirun", argv, env, signal.SIGUSR1)]

    def _openmpi(self, processes: int, names: Sequence[str], logs: Logs) -> list[str]:
        options = ["-n", str(processes), "--bind-to", "none"]
        for name in names:
            options += ["-x", name]
        if not self._slots:  # allow more processes than cores
            return [*options, "--oversubscribe"]
        hostfile = self._write_hostfile(logs, "{host} slots={count}\n")
        return [*options, "--map-by", "slot", "--hostfile", str(hostfile)]

    def _mpich(self, processes: int, names: Sequence[str], logs: Logs) -> list[str]:
        options = ["-n", str(processes), "-bind-to", "none"]
        options += ["-genvlist", ",".join(names)]
        if not self._slots:
            return options
        return [*options, "-f", str(self._write_hostfile(logs, "{host}:{count}\n"))]

    def _write_hostfile(self, logs: Logs, line: str) -> Path:
        """Writes the hosts in this MPI's own format."""
        path = logs.folder / "hostfile"
        counts = {host: self._slots.count(host) for host in self._slots}
        lines = (line.format(host=host, count=n) for host, n in counts.items())
        path.write_text("".join(lines))
        return path.absolute()


def read_hostfile(path: Path) -> list[str]:
    """Returns the host of each slot."""
    slots: list[str] = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        line = text.split("#")[0].strip()
        if not line:
            continue
        found = HOST.fullmatch(line)
        words = dict(re.findall(r"(\S+?)\s*=\s*(\S+)", (found and found["rest"]) or ""))
        count = (found and found["mpich"]) or words.get("slots", "1")
        if not found or not count.isdigit() or not int(count):
            raise ValueError(
                f"{path}, line {number}: {text.strip()!r} is not a host; expected "
                "'HOST slots=N' or 'HOST:N'"
            )
        if found["host"] in slots:
            raise ValueError(
                f"{path}, line {number}: host {found['host']} is listed twice. "
                "Write one line per host, with all its slots."
            )
        slots += [found["host"]] * int(count)
    if not slots:
        raise ValueError(f"hostfile {path} does not name any host")
    return slots


def find_flavour(mpirun: str) -> str:
    """Returns which MPI a command belongs to, by what `--version` prints."""
    if shutil.which(mpirun) is None:
        raise ValueError(
            f"{mpirun}: command not found. Install Open MPI or MPICH, or name the "
            "command with --mpirun."
        )
    found = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60
    )
    words = (found.stdout + found.stderr).lower()
    if "open mpi" in words or "openrte" in words or "open-mpi" in words:
        return "openmpi"
    if "hydra" in words or "mpich" in words or "intel(r) mpi" in words:
        return "mpich"
    first = (words.strip().splitlines() or ["nothing"])[0]
    raise ValueError(
        f"{mpirun} --version prints {first!r}, which is neither Open MPI nor MPICH. "
        "Name one of these with --mpirun."
    )
