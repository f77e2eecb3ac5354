"""The command `meshloom ledger`."""

import argparse
from pathlib import Path

from .flags import command

FAILED = 1  # exit status if the audit finds a fault


def add(commands) -> None:
    """Adds `ledger` to the commands."""
    parser = commands.add_parser("ledger", help="audit the ledger of a run")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    audit = command(
        actions,
        "audit",
        _audit,
        "verify that each sample contributed to exactly one update; status 1 if not",
    )
    audit.add_argument("run_folder", type=Path, metavar="RUN")


def _audit(args: argparse.Namespace) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    from ..record.ledger_audit import audit
    from ..verify.training_audit import COMMITS, audit_training

    is_training = (args.run_folder / COMMITS).exists()
    result = (audit_training if is_training else audit)(args.run_folder)
    print(result)
    return FAILED if result.faults else 0
