"""The command `meshloom serve`: a coordinator, a server, or both in one process."""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ...launch.atomic_file import replace_text
from ...launch.exit_codes import DONE, PREEMPTED, Unreachable
from ...launch.stop_signals import StopSignals
from ..job.fault_points import reached_of
from . import serve_clean, serve_merger, serve_status
from .devices import quiet_grpc
from .flags import command
from .serve_events import Events, StatusLines
from .service_access import add_access_flags, read_token, tls_of

if TYPE_CHECKING:
    from ...service.coordinator.coordinator import Coordinator

ROLES = ("both", "coordinator", "server")
WATCH_SECONDS = 0.5
REPEAT_SECONDS = 1.0  # a second signal within this time counts as the first
# Coordinator and servers are started together, in any order.
REGISTER_SECONDS = 60.0
# How long a server that is told to stop answers a coordinator that still saves.
LINGER_SECONDS = 30.0
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
        "--upstream",
        metavar="ADDRESS",
        help="of a service, or of another merger: add up what learners send here, "
        "and pass on one contribution",
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
        help="answer Prometheus at http://HOST:PORT/metrics. It requires no "
        "token, so HOST is 127.0.0.1 unless given; port 0: any free one",
    )
    add_access_flags(parser)
    parser.add_argument(
        "--once", action="store_true", help="exit once all jobs are done"
    )
    actions = parser.add_subparsers(metavar="ACTION")
    serve_status.add(actions, parser)
    serve_clean.add(actions, parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    quiet_grpc()
    token, tls = read_token(args.token_file), tls_of(args)
    args.folder.mkdir(parents=True, exist_ok=True)
    address_file = args.folder / "address"
    if args.store is None:  # otherwise it may be that of another coordinator
        address_file.unlink(missing_ok=True)  # of a process that was killed
    # Of several coordinators only the one that leads writes into the folder.
    role = args.role if args.upstream is None else "merger"
    events = Events(role, args.folder if args.store is None else None)
    with StopSignals(REPEAT_SECONDS) as signals:
        if args.upstream is not None:
            return serve_merger.run(args, address_file, signals, events, token, tls)
        if args.role == "server":
            return _serve_blocks(args, address_file, signals, events, token, tls)
        if args.store is not None:
            return _stand_by(args, address_file, signals, events, token, tls)
        return _coordinate(args, address_file, signals, events, token, tls)


def _check(args: argparse.Namespace) -> None:
    if args.folder is None:
        raise ValueError("serve: --folder is missing; expected --folder DIR")
    if args.metrics is not None:
        from ...service.wire.exposition import parse_bind

        parse_bind(args.metrics)
    host, colon, _ = args.bind.rpartition(":")
    if args.upstream is not None:
        serve_merger.check(args)
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


def _make_coordinator(
    args: argparse.Namespace, events: Events, token, tls, log=None
) -> "Coordinator":
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
        say=events.say,
        log=log,
        reached=reached_of(os.environ),
    )


@contextlib.contextmanager
def _metrics(
    args: argparse.Namespace, events: Events, coordinator=None, blocks=None
) -> Iterator[None]:
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
    events.say(f"metrics at http://{server.address}/metrics")
    try:
        yield
    finally:
        server.close()


def _coordinate(
    args: argparse.Namespace,
    address_file: Path,
    signals: StopSignals,
    events: Events,
    token,
    tls,
) -> int:
    from ...service.wire.calls import Server

    coordinator = _make_coordinator(args, events, token, tls)
    calls = blocks = None
    try:
        calls = Server(args.bind, coordinator.methods, {}, token, tls)
        host = args.bind.rpartition(":")[0]
        address = f"{host}:{calls.port}"
        if args.role == "both":
            blocks = _make_server(f"{host}:0", address, token, tls)
        replace_text(address_file, address + "\n")
        text = f"{args.role} at {address}, folder {args.folder}"
        events.say(text, "started", address=address)
        with _metrics(args, events, lambda: coordinator, blocks):
            return _watch(coordinator, signals, events, args.once, address_file)
    finally:
        address_file.unlink(missing_ok=True)
        coordinator.close()
        for part in (calls, blocks):
            if part is not None:
                part.close()


def _stand_by(
    args: argparse.Namespace,
    address_file: Path,
    signals: StopSignals,
    events: Events,
    token,
    tls,
) -> int:
    """Coordinates once this process is elected, until it is no longer the leader."""
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
        with _metrics(args, events, lambda: front.coordinator):
            leadership = stand_by(
                *(store, address, url.lease_seconds, front),
                is_told=lambda: bool(signals.told),
                say=events.say,
            )
            if leadership is None:
                return PREEMPTED
            log = Log(store, leadership)
            events.write_to(args.folder)
            front.coordinator = _make_coordinator(args, events, token, tls, log)
            replace_text(address_file, address + "\n")
            text = f"coordinator at {address} leads, term {log.term}, folder "
            about = {"address": address, "term": log.term}
            events.say(f"{text}{args.folder}", "leads", **about)
            return _watch(front.coordinator, signals, events, args.once, address_file)
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
    coordinator: "Coordinator",
    signals: StopSignals,
    events: Events,
    once: bool,
    address_file: Path,
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
            events.say("all jobs are done", "finished")
            return DONE
        for line in status.lines(coordinator.status({})["jobs"]):
            events.say(line, "status")
        time.sleep(WATCH_SECONDS)
    events.say("asked to stop: saving", "stop", signal=signals.told[0])
    for line in coordinator.stop("the service was asked to stop; it will continue"):
        events.say(line, "saved")
    return PREEMPTED


def _serve_blocks(
    args: argparse.Namespace,
    address_file: Path,
    signals: StopSignals,
    events: Events,
    token,
    tls,
) -> int:
    from ...service.wire.errors import Unavailable

    server = _make_server(args.bind, args.coordinator, token, tls, signals)
    try:
        replace_text(address_file, server.address + "\n")
        text = f"server at {server.address}, coordinator {args.coordinator}"
        events.say(text, "started", address=server.address)
        with _metrics(args, events, blocks=server):
            while not signals.told:
                time.sleep(WATCH_SECONDS)
        events.say("", "stop", signal=signals.told[0])
        # The blocks of this server move to others, if they may. The coordinator may
        # have been told too, and needs the servers to save.
        deadline = time.monotonic() + LINGER_SECONDS
        try:
            while time.monotonic() < deadline and len(signals.told) == 1:
                if server.may_leave():
                    events.say("no job needs this server")
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
                reached=reached_of(os.environ),
            )
        except Unavailable as error:
            if time.monotonic() > deadline or (signals is not None and signals.told):
                raise Unreachable(
                    f"the coordinator {coordinator} does not answer: {error}"
                ) from error
            time.sleep(WATCH_SECONDS)
