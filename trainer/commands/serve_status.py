"""The command `meshloom serve status`."""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .devices import quiet_grpc
from .flags import command
from .service_access import add_access_flags, read_token, tls_of

ASK_SECONDS = 10.0
WATCH_SECONDS = 2.0

Status = dict[str, Any]


def add(actions, serve: argparse.ArgumentParser) -> None:
    """Adds `status` to the actions of `meshloom serve`."""
    parser = command(
        actions,
        "status",
        functools.partial(_run, serve),
        "show members, lag, blocks per server and bytes/s of a service that runs",
    )
    parser.add_argument(
        "address",
        metavar="ADDRESS[/JOB]",
        help="of the coordinator, or of several with commas",
    )
    parser.add_argument(
        "--watch", action="store_true", help="refresh the table until Ctrl-C"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON; with --watch one line per update",
    )
    add_access_flags(parser, argparse.SUPPRESS)


def refuse_flags(args: argparse.Namespace, serve: argparse.ArgumentParser, action: str):
    """Refuses flags of `serve` before the name of an action, which would do nothing."""
    shared = ("token_file", "tls_ca", "tls_cert", "tls_key", "run", "help")
    for flag in serve._actions:
        if flag.dest in shared or not flag.option_strings:
            continue
        if getattr(args, flag.dest) != flag.default:
            raise ValueError(f"serve {action}: {flag.option_strings[0]} is not for it")


def split_address(text: str) -> tuple[str, str | None]:
    """Divides ADDRESS[/JOB]."""
    address, slash, job = text.partition("/")
    parts = [part.rpartition(":") for part in address.split(",")]
    is_good = all(host and port.isdigit() for host, _, port in parts)
    if not is_good or (slash and not job):
        raise ValueError(
            f"{text!r}: expected HOST:PORT or HOST:PORT/JOB, where `meshloom serve` "
            "runs; its folder has the address in the file `address`"
        )
    return address, job or None


def _run(serve: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    refuse_flags(args, serve, "status")
    address, job = split_address(args.address)
    quiet_grpc()
    from ...service.wire.coordinators import reach

    channel = reach(address, read_token(args.token_file), tls_of(args))
    ask = functools.partial(ask_for_status, channel, address, job)
    try:
        if args.watch:
            _watch(ask, as_json=args.json)
        elif args.json:
            print(json.dumps(ask(), indent=1))
        else:
            _print(ask())
    finally:
        channel.close()


def ask_for_status(channel: Any, address: str, job: str | None) -> Status:
    """Returns the status of a service, or of one of its jobs."""
    from ...launch.exit_codes import Unreachable
    from ...service.wire.errors import NotLeader, Unavailable

    try:
        status = channel.call("Status", {}, ASK_SECONDS)
    except NotLeader as error:
        raise Unreachable(f"{address}: {error}") from error
    except Unavailable as error:
        raise Unreachable(
            f"{error}. Does `meshloom serve` run there, with the same token and TLS?"
        ) from error
    jobs = status["jobs"]
    if not isinstance(jobs, Mapping):
        raise ValueError(
            f"{address} is a server: ask its coordinator, whose address is what this "
            "server was started with (--coordinator)"
        )
    if job is None:
        return status
    if job not in jobs:
        raise ValueError(f"there is no job {job!r} at {address}, but {sorted(jobs)}")
    return {**status, "jobs": {job: jobs[job]}}


def _watch(ask: Callable[[], Status], *, as_json: bool) -> None:
    """Shows the status again and again; the first time it must be answered."""
    from rich.console import Console
    from rich.live import Live

    from ...launch.exit_codes import Unreachable

    status, console = ask(), Console()
    if as_json or not console.is_terminal:
        while True:
            print(json.dumps(status) if as_json else lines(status), flush=True)
            time.sleep(WATCH_SECONDS)
            status = ask()
    with Live(tables(status), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            try:
                shown = tables(ask())
            except Unreachable as error:  # it may restart; the last answer stays
                shown = tables(status, note=f"no answer now: {error}")
            live.update(shown, refresh=True)


def _print(status: Status) -> None:
    from rich.console import Console
    from rich.text import Text

    Console().print(Text(lines(status)), soft_wrap=True)


def lines(status: Status) -> str:
    """Returns the status as plain text."""
    from ...sharding.text import align

    parts = []
    for title, rows in _sections(status):
        parts.append(title)
        if len(rows) > 1:
            table = align(rows, right=range(1, len(rows[0])))
            parts += [f"  {line}" for line in table.splitlines()]
    return "\n".join(parts)


def tables(status: Status, note: str = "") -> Any:
    """Returns the status as tables of rich."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown: list[Any] = []
    for title, (head, *rows) in _sections(status):
        table = Table(title=Text(title), title_justify="left", box=None)
        for i, name in enumerate(head):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        shown.append(table if rows else Text(title))
    return Group(*shown, *([Text(note, style="bold")] if note else []))


def _sections(status: Status) -> Iterable[tuple[str, list[list[str]]]]:
    """Yields a title and a table, head first, for the servers and for each job."""
    from ...sharding.text import counted, human_bytes

    servers = status["servers"]
    missing = status["num_servers"] - len(servers)
    wanted = f", waiting for {missing} more" if missing > 0 else ""
    term = f"term {status['term']}, meshloom {status['version']}"
    yield (
        f"{counted(len(servers), 'server')}{wanted}; {term}",
        [SERVER_HEAD, *map(_server_row, servers)],
    )
    for name, job in status["jobs"].items():
        title = f"{name}: {job['state']}"
        if "version" in job:
            title += (
                f", version {job['version']}, checkpoint {job.get('checkpoint', '-')}, "
            )
            title += f"learners {job.get('learners', 0)}/{job.get('num_learners', 0)} "
            title += f"({job.get('waiting', 0)} waiting), "
            title += f"{job.get('commits_per_s', 0):.2g} commits/s, "
            title += f"{human_bytes(job.get('bytes_per_s', 0))}/s contributed"
        if job.get("reason"):
            title += f"; {job['reason']}"
        rows = [_learner_row(row) for row in job.get("members", ())]
        yield title, [LEARNER_HEAD, *rows]


SERVER_HEAD: list[str] = [
    *("server", "heard of", "blocks", "bytes", "staged", "received", "sent"),
]
LEARNER_HEAD: list[str] = [
    *("learner", "incarnation", "state", "heard of", "round", "behind", "staleness"),
]


def _server_row(server: Status) -> list[str]:
    from ...sharding.text import human_bytes

    received = server.get("received_bytes_per_s", 0)
    sent = server.get("sent_bytes_per_s", 0)
    return [
        server["name"],
        _ago(server),
        str(server.get("blocks", "-")),
        human_bytes(server["bytes"]) if "bytes" in server else "-",
        str(server.get("staged", "-")),
        f"{human_bytes(received)}/s",
        f"{human_bytes(sent)}/s",
    ]


def _learner_row(row: Status) -> list[str]:
    return [
        str(row["learner"]),
        str(row["incarnation"]),
        row["state"],
        _ago(row),
        str(row["round"]),
        str(row.get("lag", "-")),
        str(row.get("staleness", "-")),
    ]


def _ago(row: Status) -> str:
    return f"{row['heard_s']:.1f} s ago" if "heard_s" in row else "-"
