"""The command `meshloom`. Nothing heavy is imported before a subcommand needs it."""

import argparse
import difflib
import errno
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ..launch import progress_file
from ..launch.exit_codes import BAD_INPUT, DONE, PREEMPTED, UNREACHABLE, Unreachable
from ..launch.masking import masked_command
from .commands import certify as cli_certify
from .commands import ckpt as cli_ckpt
from .commands import doctor as cli_doctor
from .commands import drill as cli_drill
from .commands import ledger as cli_ledger
from .commands import plan as cli_plan
from .record import failures

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
        return BAD_INPUT if failures.is_for_the_user(error) else UNREACHABLE


def _words(error: Exception) -> str:
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    what = f"{error.filename}: " if error.filename else ""
    remedy = ""
    if error.errno == errno.ENOSPC:
        remedy = ". Free some space, then run the same command again to continue"
    elif not failures.is_for_the_user(error):
        remedy = ". It may pass: run the same command again to continue"
    return f"{what}{error.strerror}{remedy}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="meshloom",
        description="A JAX trainer that is exact on every mesh.",
        epilog="MESHLOOM_TRACEBACK=1 shows where an error came from.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_explain(commands)
    _add_config(commands)
    _add_data(commands)
    cli_plan.add(commands, _command, _add_config_flags)
    _add_generate(commands)
    _add_report(commands)
    cli_ckpt.add(commands, _command)
    cli_ledger.add(commands, _command)
    cli_drill.add(commands, _command)
    cli_certify.add(commands, _command, _add_config_flags)
    cli_doctor.add(commands, _command, _add_config_flags)
    _add_launch(commands)
    return parser


def _command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run)
    return parser


def _add_config_flags(
    parser: argparse.ArgumentParser, default: str | None, *, mesh: bool = True
) -> None:
    shown = f"; default: {default}" if default else ""
    parser.add_argument(
        "--config",
        action="append",
        metavar="NAME_OR_FILE",
        help=f"a shipped config or a gin file; may be repeated, later ones win{shown}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change one value, for instance --set model.num_layers=4; may be repeated",
    )
    if mesh:
        parser.add_argument(
            "--mesh",
            metavar="SIZES",
            help="the mesh instead of the config's, such as data=2,fsdp=2,tensor=2",
        )


def _add_train(commands) -> None:
    parser = _command(
        commands, "train", _train, "train a model; with no arguments, the default one"
    )
    _add_config_flags(parser, "default")
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="the run folder, continued if it is there; default: runs/CONFIG",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="the number of updates")
    parser.add_argument(
        "--cpu-devices",
        type=int,
        metavar="N",
        help="train on the CPU, as N devices",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and show the plan; touch and train nothing",
    )
    parser.add_argument(
        "--insist",
        action="store_true",
        help="continue a run folder that was started with another config",
    )


def _add_explain(commands) -> None:
    parser = _command(
        commands, "explain", _explain, "show how every parameter is cut on a mesh, why"
    )
    _add_config_flags(parser, "default")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--against", metavar="SIZES", help="show what differs from this other mesh"
    )


def _add_config(commands) -> None:
    parser = commands.add_parser(
        "config", help="show a complete config, or compare two"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = _command(
        actions, "show", _config_show, "print every value and where it came from"
    )
    _add_config_flags(show, "default")
    diff = _command(actions, "diff", _config_diff, "compare two configs or run folders")
    diff.add_argument("a", metavar="A", help="config name, gin file or run folder")
    diff.add_argument("b", metavar="B")


def _add_data(commands) -> None:
    parser = commands.add_parser("data", help="prepare a corpus")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    build = _command(
        actions,
        "build",
        _data_build,
        "tokenize text files into ArrayRecord shards; run it again to resume",
    )
    build.add_argument(
        "--input", required=True, metavar="GLOB_OR_FOLDER", help="the text files"
    )
    build.add_argument("--output", required=True, type=Path, metavar="DIR")
    build.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json; default: bytes"
    )
    build.add_argument(
        "--shard-size", type=int, metavar="BYTES", help="bytes of text in a shard"
    )


def _add_generate(commands) -> None:
    parser = _command(
        commands, "generate", _generate, "continue a text with a trained model"
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=256, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most likely token"
    )
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, metavar="N", help="default: the newest")
    parser.add_argument(
        "--mesh",
        default="fsdp=-1",
        metavar="SIZES",
        help="how to cut the model over this machine's devices; default: fsdp=-1",
    )


def _add_report(commands) -> None:
    parser = _command(
        commands, "report", _report, "write a run's report as one HTML file"
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, metavar="FILE")


def _add_launch(commands) -> None:
    from ..launch.targets import k8s, local, mpi, slurm, ssh

    parser = commands.add_parser(
        "launch", help="start the processes of a job, and bring them back"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for target in (local, slurm, mpi, ssh, k8s):
        name = target.__name__.rpartition(".")[2]
        target.add_flags(_command(actions, name, target.launch, target.SUMMARY))


def _train(args) -> int | None:
    from .commands import actions as commands

    return commands.train(args)


def _explain(args) -> None:
    from .commands import actions as commands

    commands.explain(args)


def _config_show(args) -> None:
    from .commands import actions as commands

    commands.config_show(args)


def _config_diff(args) -> None:
    from .commands import actions as commands

    commands.config_diff(args)


def _data_build(args) -> None:
    from .data import corpus

    settings = {} if args.shard_size is None else {"shard_size": args.shard_size}
    corpus.build_with_progress(
        args.input, args.output, tokenizer=args.tokenizer, **settings
    )


def _generate(args) -> None:
    from .commands import actions as commands

    commands.generate(args)


def _report(args) -> None:
    from .report import write_report

    print(write_report(args.run_folder, args.output))


if __name__ == "__main__":
    sys.exit(main())
