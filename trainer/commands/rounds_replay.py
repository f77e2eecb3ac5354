"""The command `meshloom rounds replay`."""

import argparse
from pathlib import Path

from .devices import use_cpu
from .flags import command


def add(actions) -> None:
    """Adds `replay` to the actions of `meshloom rounds`."""
    parser = command(
        actions,
        "replay",
        run,
        "recompute a finished training between learners from its commit log, in one "
        "process, and compare the final parameters bit for bit",
    )
    parser.add_argument(
        "folder", type=Path, metavar="RUN", help="the folder of the training"
    )
    parser.add_argument(
        "--cpu-devices",
        type=int,
        metavar="N",
        help="CPU devices to use; default: as many as the largest learner had",
    )


def run(args: argparse.Namespace) -> int:
    from ..verify import replay

    use_cpu(args.cpu_devices or replay.num_devices(args.folder))
    verdict = replay.replay(args.folder)
    print(verdict)
    return 0 if verdict.passed else 1
