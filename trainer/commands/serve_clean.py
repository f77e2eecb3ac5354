"""The command `meshloom serve clean`."""

import argparse
import functools

from .devices import quiet_grpc
from .flags import command
from .serve_status import ask_for_status, refuse_flags, split_address
from .service_access import add_access_flags, read_token, tls_of

CLEAN_SECONDS = 300.0


def add(actions, serve: argparse.ArgumentParser) -> None:
    """Adds `clean` to the actions of `meshloom serve`."""
    parser = command(
        actions,
        "clean",
        functools.partial(_run, serve),
        "remove now what a running service no longer needs: what dead "
        "learners left on the servers, blocks of finished jobs, and old entries of "
        "the log",
    )
    parser.add_argument(
        "address",
        metavar="ADDRESS[/JOB]",
        help="of the coordinator, or of several with commas",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only say what would be removed"
    )
    add_access_flags(parser, argparse.SUPPRESS)


def _run(serve: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    refuse_flags(args, serve, "clean")
    address, job = split_address(args.address)
    quiet_grpc()
    from ...launch.exit_codes import Unreachable
    from ...service.wire.coordinators import reach
    from ...service.wire.errors import Unavailable

    channel = reach(address, read_token(args.token_file), tls_of(args))
    try:
        # Its errors say which service is at that address, and what it has.
        ask_for_status(channel, address, job)
        message = {"dry_run": args.dry_run, **({} if job is None else {"job": job})}
        answer = channel.call("Clean", message, CLEAN_SECONDS)
    except Unavailable as error:
        raise Unreachable(f"{address}: {error}") from error
    finally:
        channel.close()
    for name, found in answer["jobs"].items():
        for line in found["found"] or ["nothing to remove"]:
            print(f"{name}: {line}")
    if not answer["jobs"]:
        print("there is no job")
