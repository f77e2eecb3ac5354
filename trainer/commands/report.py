"""The command `meshloom report`."""

import argparse
from pathlib import Path

from .flags import command


def add(commands) -> None:
    """Adds `report` to the commands."""
    parser = command(
        commands, "report", _report, "write the report of a run as one HTML file"
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, metavar="FILE")


def _report(args: argparse.Namespace) -> None:
    from ..report import write_report

    print(write_report(args.run_folder, args.output))
