"""`--learners` of `meshloom launch`: its flags, and the commands that they describe."""

import argparse
import dataclasses
import functools
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import flags
from .fleet import Fleet, FleetSettings
from .fleet_parts import Commands
from .process_env import is_loopback
from .settings import Settings
from .target import Command, free_port, local_host

LOOPBACK = "127.0.0.1"
PROGRAM = (sys.executable, "-P", "-m", "meshloom.trainer.cli")
# Flags of train that we set, for each learner another value.
OURS = ("--exchange", "--learner")


@dataclasses.dataclass(frozen=True)
class Share:
    """What one learner gets of the hosts: flags of `meshloom launch`, and variables."""

    flags: Sequence[str]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


def add(parser: argparse.ArgumentParser, *, is_on_hosts: bool = True) -> None:
    """Adds the flags of a fleet.

    Args:
      is_on_hosts: whether processes may run on hosts other than this one.
    """
    group = parser.add_argument_group("learners that do not wait for each other")
    group.add_argument(
        "--learners",
        type=int,
        metavar="N",
        help="train with N learners, each a job of its own, that exchange parameters "
        "through a service; see docs/service.md",
    )
    group.add_argument(
        "--servers", type=int, metavar="M", help="of that service; default: 1"
    )
    group.add_argument(
        "--copies",
        type=int,
        choices=(1, 2),
        metavar="N",
        help="servers that hold each block, 1 or 2: with 2, one that dies is replaced "
        "while the training goes on; default: 1",
    )
    group.add_argument(
        "--each",
        action="append",
        default=[],
        metavar="'I FLAGS'",
        help="more flags of train for learner I, such as --each '1 --mesh fsdp=2'; may "
        "be repeated",
    )
    group.add_argument(
        "--save-commits",
        type=int,
        metavar="N",
        help="commits between two checkpoints of the service; default: that of serve",
    )
    if not is_on_hosts:
        group.add_argument(
            "--coordinators",
            type=int,
            metavar="K",
            help="of that service: one leads, the others stand by; default: 1",
        )
        group.add_argument(
            "--store",
            metavar="URL",
            help="etcd://HOST:PORT[,...]/PREFIX: where they keep the log; required for "
            "several; each run needs a prefix of its own",
        )
    default = "its host name" if is_on_hosts else LOOPBACK
    group.add_argument(
        "--service-host",
        metavar="NAME",
        help="name or address of this host that the others can reach; default: "
        f"{default}",
    )


def is_given(args: argparse.Namespace) -> bool:
    """Returns whether a fleet is to be launched; checks its flags."""
    if args.learners is None:
        for name in (
            *("servers", "copies", "coordinators", "store", "each", "save_commits"),
            *("service_host", "token_secret"),
        ):
            if getattr(args, name, None):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} needs --learners; add it, or leave both out")
        return False
    for name in ("learners", "servers", "save_commits", "coordinators"):
        value, flag = getattr(args, name, None), f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be >= 1, got {value}")
    if (getattr(args, "coordinators", None) or 1) > 1 and args.store is None:
        raise ValueError(
            f"--coordinators {args.coordinators} without --store: several coordinators "
            "keep their log in etcd; add --store etcd://HOST:PORT/PREFIX"
        )
    if args.command[0] != "train":
        raise ValueError(
            f"--learners starts several trainings, but the command is "
            f"{args.command[0]!r}; expected train"
        )
    for word in args.command:
        if word.partition("=")[0] in OURS:
            raise ValueError(
                f"{word.partition('=')[0]} is set for each learner by --learners; "
                "remove it from the command"
            )
        if "exchange.copies" in word and getattr(args, "copies", None) is not None:
            raise ValueError(f"{word}: --copies sets it too; remove one of them")
    return True


def divide(what: str, items: Sequence[str], learners: int) -> list[list[str]]:
    """Divides hosts or slots evenly among learners; neighbors stay together."""
    each, rest = divmod(len(items), learners)
    if rest or not each:
        raise ValueError(
            f"{len(items)} {what} cannot be divided evenly among {learners} learners. "
            f"Change --learners, or the number of {what}."
        )
    return [list(items[i * each : (i + 1) * each]) for i in range(learners)]


def launch(
    args: argparse.Namespace,
    target: str,
    shares: Sequence[Share],
    *,
    processes: int,
    hosts: Sequence[str] = (),
) -> int:
    """Runs a fleet until it is done; returns the exit code.

    Args:
      target: of `meshloom launch`, for each learner.
      processes: of each learner.
      hosts: all hosts of the learners; empty for this one only.
    """
    logs, run = flags.log_folder(args), run_folder(args)
    Settings(  # checks what only the learners' supervisors use
        processes=processes,
        min_processes=getattr(args, "min_processes", None),
        max_restarts=args.max_restarts,
        stall_seconds=args.stall_seconds,
        start_seconds=args.start_seconds,
        grace_seconds=args.grace_seconds,
    )
    host = LOOPBACK
    if set(hosts) - {local_host()}:
        host = service_host(args.service_host)
    elif args.service_host:
        host = args.service_host
    ports: set[int] = set()
    for _ in range(getattr(args, "coordinators", None) or 1):
        ports.add(free_port(ports))
    address = ",".join(f"{host}:{port}" for port in sorted(ports))
    each_of(args)  # raises before anything is written
    settings = FleetSettings(
        processes=processes,
        max_restarts=args.max_restarts,
        grace_seconds=args.grace_seconds,
    )
    make = functools.partial(make_commands, args, target, shares, run, address)
    return Fleet(make, run, logs, settings).run()


def run_folder(args: argparse.Namespace) -> Path:
    """Returns the run folder of the command."""
    found = flags.run_folder(args.command)
    if "://" in found:
        raise ValueError(
            f"the run folder {found} is not on this machine, but the service writes "
            "there. Name a folder of this machine with --workdir, and a bucket for "
            "checkpoints with --set checkpoint_folder."
        )
    return Path(found).absolute()


def service_host(given: str | None) -> str:
    """Returns the name under which other hosts reach this one."""
    host = given or local_host()
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(
            f"host {host}: {error.strerror}. Give a name or address of this host that "
            "the others can reach, with --service-host."
        ) from None
    if is_loopback(address):
        raise ValueError(
            f"host {host} is {address} here: other hosts cannot reach the service "
            "there. Give an address that they can reach, with --service-host."
        )
    return host


def make_commands(
    args: argparse.Namespace,
    target: str,
    shares: Sequence[Share],
    run: Path,
    address: str,
) -> Commands:
    """Returns the commands of a fleet; makes the folders that they need.

    Args:
      address: host:port of the coordinator; those of several with commas.
    """
    num_servers, more = args.servers or 1, each_of(args)
    home, token = _make_home(run), _make_token(run)
    # The service computes on the CPU, and must not take a learner's devices.
    env = {"PYTHONUNBUFFERED": "1", **os.environ, "JAX_PLATFORMS": "cpu"}
    serve = [*PROGRAM, "serve", "--token-file", str(token), "--role"]
    coordinator = [*serve, "coordinator", "--folder", str(home)]
    coordinator += ["--servers", str(num_servers), *given(args, "store")]
    if args.save_commits is not None:
        coordinator += ["--save-every", str(args.save_commits)]
    addresses = address.split(",")
    host = addresses[0].rpartition(":")[0]
    server = [*serve, "server", "--bind", f"{host}:0", "--coordinator", address]
    servers = [
        Command(f"server {n}", [*server, "--folder", str(home / f"server-{n}")], env)
        for n in range(num_servers)
    ]
    learners = []
    for number, share in enumerate(shares):
        argv = [*PROGRAM, "launch", target, *share.flags, *_supervision(args), "--"]
        argv += [*args.command, *_cpu_devices(args)]
        argv += ["--exchange", f"{address}/{run.name}"]
        argv += ["--learner", f"{number}/{len(shares)}"]
        argv += ["--workdir", str(run / "learners" / str(number))]
        argv += ["--set", f"exchange.token_file={str(token)!r}"]
        if getattr(args, "copies", None) is not None:
            argv += ["--set", f"exchange.copies={args.copies}"]
        argv += more[number]
        variables = {"PYTHONUNBUFFERED": "1", **os.environ, **share.env}
        learners.append(Command(f"learner {number}", argv, variables))
    names = ["coordinator"]
    if len(addresses) > 1:
        names = [f"coordinator {n}" for n in range(len(addresses))]
    center, *standbys = (
        Command(name, [*coordinator, "--bind", bind], env)
        for name, bind in zip(names, addresses, strict=True)
    )
    beat = home / "address"
    return Commands(center, servers, learners, beat=beat, standbys=standbys)


def each_of(args: argparse.Namespace) -> list[list[str]]:
    """Returns the flags of --each, by learner."""
    found: list[list[str]] = [[] for _ in range(args.learners)]
    for text in args.each:
        number, *words = shlex.split(text) or [""]
        if not (number.isdecimal() and int(number) < args.learners and words):
            raise ValueError(
                f"--each {text!r}: expected the number of a learner from 0 to "
                f"{args.learners - 1} and flags of train, such as "
                "--each '0 --mesh fsdp=2'"
            )
        found[int(number)] += words
    return found


def _supervision(args: argparse.Namespace) -> list[str]:
    names = ("max_restarts", "stall_seconds", "start_seconds", "grace_seconds")
    return [word for name in names for word in given(args, name)]


def given(args: argparse.Namespace, name: str) -> list[str]:
    """Returns a flag as it was given to us, for another `meshloom launch`."""
    value = getattr(args, name, None)
    return [] if value is None else [f"--{name.replace('_', '-')}={value}"]


def _cpu_devices(args: argparse.Namespace) -> list[str]:
    """Returns --cpu-devices as a flag of train, where --each can override it."""
    count = flags.cpu_devices(args)
    return [] if count is None else ["--cpu-devices", str(count)]


def _make_home(run: Path) -> Path:
    """Makes the folder of the service, in which the job's folder is the run folder.

    It is inside the run folder, so that two runs never share a log.
    """
    home = run / "service" / "log"
    home.mkdir(parents=True, exist_ok=True)
    link = home / run.name
    if not link.is_symlink():
        link.symlink_to(Path("..", ".."), target_is_directory=True)
    return home


def _make_token(run: Path) -> Path:
    """Writes a new secret that only this user can read; returns its file."""
    path = run / "logs" / "token"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return path
