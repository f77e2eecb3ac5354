"""The command `meshloom ledger`."""

import argparse
from pathlib import Path

from .flags import command

FAILED = 1  # exit status of an audit that found a fault


def add(commands) -> None:
    """Adds `ledger` to the commands."""
    parser = commands.add_parser("ledger", help="look into the ledger of a run")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    audit = command(
        actions,
        "audit",
        _audit,
        "prove that each sample contributed to exactly one update; status 1 if not",
    )
    audit.add_argument("run_folder", type=Path, metavar="RUN")


def _audit(args: argparse.Namespace) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    from ..record.ledger_audit import audit

    found = audit(args.run_folder)
    print(found)
    return FAILED if found.faults else 0
