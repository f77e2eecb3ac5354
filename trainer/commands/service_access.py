"""Flags by which a process shows that it may talk to a service: a token, TLS files."""

import argparse
from pathlib import Path
from typing import Any

_TLS = (("ca", "authority"), ("cert", "certificate"), ("key", "key"))


def add_access_flags(parser: argparse.ArgumentParser, default: Any = None) -> None:
    """Adds --token-file and --tls-*.

    Args:
      default: argparse.SUPPRESS for an action, so that flags before its name count too.
    """
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        default=default,
        help="a secret that all must show",
    )
    for name, what in _TLS:
        parser.add_argument(
            f"--tls-{name}",
            type=Path,
            metavar="FILE",
            default=default,
            help=f"mutual TLS: the {what}",
        )


def read_token(path: Path | None) -> str | None:
    """Returns the secret in a file."""
    if path is None:
        return None
    token = path.read_text().strip()
    if not token:
        raise ValueError(
            f"--token-file {path}: the file is empty; write a secret to it"
        )
    return token


def tls_of(args: argparse.Namespace) -> Any:
    """Returns the files of --tls-*, or None."""
    files = {name: getattr(args, f"tls_{name}") for name, _ in _TLS}
    given = [path for path in files.values() if path is not None]
    if not given:
        return None
    if len(given) < len(files):
        missing = next(name for name, path in files.items() if path is None)
        raise ValueError(f"--tls-{missing} is missing: TLS needs all three files")
    from ...service.wire.credentials import Tls

    return Tls(**files)
