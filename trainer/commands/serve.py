"""The command `meshloom serve`: a coordinator, a server, or both in one process."""

import argparse
import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...launch.atomic_file import replace_text
from ...launch.exit_codes import DONE, PREEMPTED, Unreachable
from ...launch.stop_signals import StopSignals
from . import serve_status
from .devices import quiet_grpc
from .flags import command
from .service_access import add_access_flags, read_token, tls_of

if TYPE_CHECKING:
    from ...service.coordinator.coordinator import Coordinator

ROLES = ("both", "coordinator", "server")
WATCH_SECONDS = 0.5
STATUS_SECONDS = 15.0
REPEAT_SECONDS = 1.0  # a second signal within this time counts as the first
# Coordinator and servers are started together, in any order.
REGISTER_SECONDS = 60.0
# How long a server that is told to stop answers a coordinator that still saves.
LINGER_SECONDS = 30.0
FULL = (errno.ENOSPC, errno.EDQUOT)
WILDCARDS = ("0.0.0.0", "[::]", "")


def add(commands) -> None:
    """Adds `serve` to the commands."""
    parser = command(commands, "serve", run, "hold the parameters of learners")
    parser.add_argument(
        "--bind",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="the address that others use; port 0: any free one; default: %(default)s",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="job NAME lives in DIR/NAME; DIR/address has the address once it is bound",
    )
    parser.add_argument(
        "--role", choices=ROLES, default="both", help="default: %(default)s"
    )
    parser.add_argument(
        "--coordinator",
        metavar="ADDRESS",
        help="of the coordinator, or of several with commas; for --role server",
    )
    parser.add_argument(
        "--servers",
        type=int,
        metavar="N",
        help="open jobs once N servers have registered; default: 1",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="etcd://HOST:PORT[,...]/PREFIX: keep the log there, so that several "
        "coordinators can stand by for each other; default: DIR/coordinator.db",
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=100,
        metavar="N",
        help="commits between two checkpoints; default: %(default)s",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="answer Prometheus at http://HOST:PORT/metrics. It asks nobody for a "
        "token, so HOST is 127.0.0.1 unless given; port 0: any free one",
    )
    add_access_flags(parser)
    parser.add_argument(
        "--once", action="store_true", help="exit once all jobs are done"
    )
    actions = parser.add_subparsers(metavar="ACTION")
    serve_status.add(actions, parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    quiet_grpc()
    token, tls = read_token(args.token_file), tls_of(args)
    args.folder.mkdir(parents=True, exist_ok=True)
    address_file = args.folder / "address"
    if args.store is None:  # otherwise it may be that of another coordinator
        address_file.unlink(missing_ok=True)  # of a process that was killed
    with StopSignals(REPEAT_SECONDS) as signals:
        if args.role == "server":
            return _serve_blocks(args, address_file, signals, token, tls)
        if args.store is not None:
            return _stand_by(args, address_file, signals, token, tls)
        return _coordinate(args, address_file, signals, token, tls)


def _check(args: argparse.Namespace) -> None:
    if args.folder is None:
        raise ValueError("serve: --folder is missing; expected --folder DIR")
    if args.metrics is not None:
        from ...service.wire.exposition import parse_bind

        parse_bind(args.metrics)
    host, colon, _ = args.bind.rpartition(":")
    if args.role != "coordinator" and colon and host in WILDCARDS:
        raise ValueError(
            f"--bind {args.bind}: learners are told this address, so it must be one at "
            "which they reach this machine"
        )
    if (args.role == "server") != (args.coordinator is not None):
        raise ValueError(
            f"--role {args.role} with --coordinator {args.coordinator}: give the "
            "address of the coordinator to --role server, and to no other"
        )
    if args.role == "server" and (args.once or args.servers is not None):
        raise ValueError("--once and --servers are for the coordinator, not a server")
    if args.store is not None and args.role != "coordinator":
        raise ValueError(
            f"--store with --role {args.role}: coordinators that stand by for each "
            "other hold no blocks; use --role coordinator, and servers of their own"
        )
    for flag, value in (("--servers", args.servers), ("--save-every", args.save_every)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be >= 1, got {value}")


def _make_coordinator(args: argparse.Namespace, token, tls, log=None) -> "Coordinator":
    from ...service.coordinator.coordinator import Coordinator
    from ...service.coordinator.servers import RemoteServer
    from ...service.coordinator.settings import Settings
    from ...service.wire.calls import Channel

    offset = time.time() - time.monotonic()  # a change of the clock ends no lease
    return Coordinator(
        args.folder,
        num_servers=args.servers or 1,
        version=metadata.version("meshloom"),
        settings=Settings(save_every=args.save_every),
        connect=lambda n, a: RemoteServer(n, a, Channel(a, token, tls)),
        clock=lambda: time.monotonic() + offset,
        say=_say,
        log=log,
    )


@contextlib.contextmanager
def _metrics(args: argparse.Namespace, coordinator=None, blocks=None) -> Iterator[None]:
    """Answers Prometheus, if --metrics is given.

    Args:
      coordinator: returns the one that leads, or None while this process stands by.
      blocks: the process's server.
    """
    if args.metrics is None:
        yield
        return
    from ...service.coordinator.metrics import of_coordinator
    from ...service.server.metrics import of_server
    from ...service.wire.exposition import Metric, MetricsServer

    def collect() -> list[Metric]:
        found: list[Metric] = []
        if coordinator is not None:
            leader = coordinator()
            found += of_coordinator(None if leader is None else leader.status({}))
        if blocks is not None:
            found += of_server(blocks.blocks.held())
        return found

    server = MetricsServer(args.metrics, collect)
    _say(f"metrics at http://{server.address}/metrics")
    try:
        yield
    finally:
        server.close()


def _coordinate(
    args: argparse.Namespace, address_file: Path, signals: StopSignals, token, tls
) -> int:
    from ...service.wire.calls import Server

    coordinator = _make_coordinator(args, token, tls)
    calls = blocks = None
    try:
        calls = Server(args.bind, coordinator.methods, {}, token, tls)
        host = args.bind.rpartition(":")[0]
        address = f"{host}:{calls.port}"
        if args.role == "both":
            blocks = _make_server(f"{host}:0", address, token, tls)
        replace_text(address_file, address + "\n")
        _say(f"{args.role} at {address}, folder {args.folder}")
        with _metrics(args, lambda: coordinator, blocks):
            return _watch(coordinator, signals, args.once, address_file)
    finally:
        address_file.unlink(missing_ok=True)
        coordinator.close()
        for part in (calls, blocks):
            if part is not None:
                part.close()


def _stand_by(
    args: argparse.Namespace, address_file: Path, signals: StopSignals, token, tls
) -> int:
    """Coordinates once this process is elected, until it leads no longer."""
    from ...service.coordinator.front import Front, stand_by
    from ...service.coordinator.log import Log
    from ...service.store import etcd_url
    from ...service.store.etcd import EtcdStore
    from ...service.store.store import Deposed
    from ...service.wire.calls import Server

    url, front = etcd_url.parse(args.store), Front()
    store = EtcdStore(url)
    calls = Server(args.bind, front.methods, {}, token, tls)
    address = f"{args.bind.rpartition(':')[0]}:{calls.port}"
    try:
        with _metrics(args, lambda: front.coordinator):
            leadership = stand_by(
                *(store, address, url.lease_seconds, front),
                is_told=lambda: bool(signals.told),
                say=_say,
            )
            if leadership is None:
                return PREEMPTED
            log = Log(store, leadership)
            front.coordinator = _make_coordinator(args, token, tls, log)
            replace_text(address_file, address + "\n")
            _say(
                f"coordinator at {address} leads, term {log.term}, folder {args.folder}"
            )
            return _watch(front.coordinator, signals, args.once, address_file)
    except Deposed as error:
        raise Unreachable(str(error)) from error
    finally:
        if front.coordinator is not None:
            if address_file.exists() and address_file.read_text().strip() == address:
                address_file.unlink()  # unless it is that of the next leader
            front.coordinator.close()
        store.close()
        calls.close()


def _watch(
    coordinator: "Coordinator", signals: StopSignals, once: bool, address_file: Path
) -> int:
    """Waits for the end: a signal, a failure, or that all jobs are done.

    Touches the file meanwhile, by which `launch` sees that this process is not stopped.
    """
    status = StatusLines(time.monotonic)
    while not signals.told:
        coordinator.watch()
        if address_file.exists():  # you may have deleted it
            os.utime(address_file)
        if (failure := coordinator.failure) is not None:
            raise ValueError(failure) if coordinator.must_fix else Unreachable(failure)
        if once and coordinator.is_over():
            _say("all jobs are done")
            return DONE
        for line in status.lines(coordinator.status({})["jobs"]):
            _say(line)
        time.sleep(WATCH_SECONDS)
    _say("asked to stop: saving")
    for line in coordinator.stop("the service was asked to stop; it will continue"):
        _say(line)
    return PREEMPTED


def _serve_blocks(
    args: argparse.Namespace, address_file: Path, signals: StopSignals, token, tls
) -> int:
    from ...service.wire.errors import Unavailable

    server = _make_server(args.bind, args.coordinator, token, tls, signals)
    try:
        replace_text(address_file, server.address + "\n")
        _say(f"server at {server.address}, coordinator {args.coordinator}")
        with _metrics(args, blocks=server):
            while not signals.told:
                time.sleep(WATCH_SECONDS)
        # The blocks of this server move to others, if they may. The coordinator may
        # have been told too, and needs the servers to save.
        deadline = time.monotonic() + LINGER_SECONDS
        try:
            while time.monotonic() < deadline and len(signals.told) == 1:
                if server.may_leave():
                    _say("no job needs this server any more")
                    break
                time.sleep(WATCH_SECONDS)
        except Unavailable:
            pass  # it is gone: nobody needs this server any more
        return PREEMPTED
    finally:
        address_file.unlink(missing_ok=True)
        server.close()


def _make_server(
    bind: str, coordinator: str, token, tls, signals: StopSignals | None = None
):
    """Starts a server and registers it, which may take until the coordinator is up."""
    from ...service.server.server import ServerProcess
    from ...service.wire.errors import Unavailable
    from ..run.exchange_update import make_update
    from .devices import use_cpu

    use_cpu(1)
    deadline = time.monotonic() + REGISTER_SECONDS
    while True:
        try:
            return ServerProcess(
                bind,
                coordinator=coordinator,
                make_update=make_update,
                token=token,
                tls=tls,
            )
        except Unavailable as error:
            if time.monotonic() > deadline or (signals is not None and signals.told):
                raise Unreachable(
                    f"the coordinator {coordinator} does not answer: {error}"
                ) from error
            time.sleep(WATCH_SECONDS)


class StatusLines:
    """One line about each job that moves, a few times a minute."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._shown: dict[str, tuple[float, dict[str, Any]]] = {}

    def lines(self, jobs: dict[str, dict[str, Any]]) -> list[str]:
        """Returns what is to be shown now."""
        now, found = self._clock(), []
        for name, status in jobs.items():
            then, before = self._shown.get(name, (now, None))
            # A job that waits for servers has no version yet.
            if before is None or "version" not in before:
                self._shown[name] = now, status
            elif now - then >= STATUS_SECONDS:
                self._shown[name] = now, status
                if status != before:
                    found.append(_status_line(name, before, status, now - then))
        return found


def _status_line(name: str, before: dict, now: dict, seconds: float) -> str:
    rounds = (now["version"] - before["version"]) / seconds
    moved = (now.get("bytes", 0) - before.get("bytes", 0)) / seconds
    return (
        f"{name}: {now['state']}, version {now['version']}, {rounds:.2g} rounds/s, "
        f"learners {now.get('learners', 0)}/{now.get('num_learners', 0)} "
        f"({now.get('waiting', 0)} waiting), {moved / 1e6:.3g} MB/s"
    )


def _say(text: str) -> None:
    """Writes a line to stdout at once, also into a pipe or from several threads."""
    try:
        os.write(1, f"meshloom serve: {text}\n".encode())
    except OSError as error:
        if error.errno not in FULL:  # or a log on a full disk would end the service
            raise
