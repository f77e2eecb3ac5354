"""The command `meshloom`. Heavy imports wait until a subcommand needs them."""

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
    huggingface,
    launch,
    ledger,
    plan,
    predict,
    report,
    rounds,
    scale,
    serve,
    test,
    train,
    tune,
)
from .record import failures

# In the order of --help.
COMMANDS = (
    *(train, tune, explain, config, data, plan, test, predict, generate, report),
    *(ckpt, huggingface, ledger, drill, certify, scale, doctor, launch, rounds, serve),
)
# What shells report for Ctrl-C, and for a pipe whose reader is gone.
INTERRUPTED, PIPE_CLOSED = 130, 141
# How long a process that failed waits for the others to fail too.
SHUTDOWN_SECONDS = 2.0


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, and does not accept abbreviated flags.

    An abbreviation would change its meaning when a flag with the same prefix is added.
    """

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args=None, namespace=None):
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:  # rejected here, so that the message names the subcommand
            # A worker's stderr goes to its log, so secrets are masked.
            message = " ".join(["unrecognized arguments:", *masked_command(unknown)])
            flag = unknown[0].partition("=")[0]
            flags = self._option_string_actions
            for near in difflib.get_close_matches(flag, flags, n=1):
                message += f" (did you mean {near}?)"
            self.error(message)
        return parsed, unknown

    def error(self, message: str):
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    status = _run(args)
    if status not in (DONE, PREEMPTED):
        _end_process_of_job(status)
    return status


def _end_process_of_job(status: int) -> None:
    """Ends this process if it is one of several, since the others may wait for it.

    On a normal exit jax would wait for them in turn, until one of their watchdogs ends
    the job with a status that does not say why.
    """
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return
    if jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        progress_file.leave(status)
        # If all have failed, all are here: the first to exit would abort the others.
        shutdown = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(SHUTDOWN_SECONDS)
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
        # The reader, such as `head`, is done; flushing the rest would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Unreachable as error:
        _complain(str(error))
        return UNREACHABLE
    except (ValueError, FloatingPointError, OSError) as error:
        is_expected = isinstance(error, OSError) or failures.is_ours(error)
        if os.environ.get("MESHLOOM_TRACEBACK") or not is_expected:
            raise
        _complain(_message(error))
        return BAD_INPUT if failures.is_user_error(error) else UNREACHABLE


def _complain(text: str) -> None:
    """Writes the last line, unless stderr is a file on a disk that is full.

    The exit status says then what kind of error it was, and must not be lost too.
    """
    try:
        print(f"meshloom: {text}", file=sys.stderr, flush=True)
    except OSError as full:
        if full.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stderr = open(os.devnull, "w")  # what it still holds cannot be flushed


def _message(error: Exception) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    what = f"{error.filename}: " if error.filename else ""
    remedy = ""
    if error.errno == errno.ENOSPC:
        remedy = ". Free some space, then run the same command again to continue"
    elif not failures.is_user_error(error):
        remedy = ". This may be transient: run the same command again to continue"
    return f"{what}{error.strerror}{remedy}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="meshloom",
        description="A JAX trainer that is exact on every mesh.",
        epilog="Set MESHLOOM_TRACEBACK=1 to show where an error came from.",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
