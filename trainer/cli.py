"""The command `meshloom`. Nothing heavy is imported before a subcommand needs it."""

import argparse
import difflib
import errno
import os
import sys
import threading
from collections.abc import Sequence

from ..launch import progress_file
from ..launch.exit_codes import BAD_INPUT, DONE, PREEMPTED, UNREACHABLE, Unreachable
from ..launch.masking import masked_command
from .commands import (
    certify,
    ckpt,
    config,
    data,
    doctor,
    drill,
    explain,
    generate,
    launch,
    ledger,
    plan,
    report,
    train,
)
from .record import failures

# In the order of the help.
COMMANDS = (
    *(train, explain, config, data, plan, generate, report, ckpt, ledger, drill),
    *(certify, doctor, launch),
)
# What shells report for Ctrl-C, and for a pipe whose reader has gone.
INTERRUPTED, PIPE_CLOSED = 130, 141
# How long a process that failed waits for the others to fail alike.
LEAVING_SECONDS = 2.0


class Parser(argparse.ArgumentParser):
    """Answers wrong arguments with one line; takes no shortened flags.

    A shortened flag would change its meaning with the next flag that starts alike.
    """

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args=None, namespace=None):
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # refused here, by the command that lacks them
            # A worker's stderr is kept in its log: a misspelled flag's key is not.
            message = " ".join(["unrecognized arguments:", *masked_command(unknown)])
            flag = unknown[0].partition("=")[0]
            flags = self._option_string_actions
            for near in difflib.get_close_matches(flag, flags, n=1):
                message += f" (did you mean {near}?)"
            self.error(message)
        return found, unknown

    def error(self, message: str):
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    status = _run(args)
    if status not in (DONE, PREEMPTED):
        _end_process_of_job(status)
    return status


def _end_process_of_job(status: int) -> None:
    """Ends this process if it is one of several; the others may wait for it.

    On the usual way out jax waits for them in turn, and what ends the job first would
    be one of their watchdogs, with a status that does not say why.
    """
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return
    if jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        progress_file.leave(status)
        # Where all fail alike, all are here: the first to go would abort the others.
        leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        leaving.start()
        leaving.join(LEAVING_SECONDS)
        os._exit(status)


def _run(args: argparse.Namespace) -> int:
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("meshloom: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; flushing the rest would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Unreachable as error:
        print(f"meshloom: {error}", file=sys.stderr)
        return UNREACHABLE
    except (ValueError, FloatingPointError, OSError) as error:
        is_told = isinstance(error, OSError) or failures.is_ours(error)
        if os.environ.get("MESHLOOM_TRACEBACK") or not is_told:
            raise
        print(f"meshloom: {_words(error)}", file=sys.stderr)
        return BAD_INPUT if failures.is_user_error(error) else UNREACHABLE


def _words(error: Exception) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    what = f"{error.filename}: " if error.filename else ""
    remedy = ""
    if error.errno == errno.ENOSPC:
        remedy = ". Free some space, then run the same command again to continue"
    elif not failures.is_user_error(error):
        remedy = ". It may pass: run the same command again to continue"
    return f"{what}{error.strerror}{remedy}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="meshloom",
        description="A JAX trainer that is exact on every mesh.",
        epilog="MESHLOOM_TRACEBACK=1 shows where an error came from.",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
