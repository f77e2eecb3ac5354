"""Rejects secrets in a config, because run folders, checkpoints and reports contain it.

They cannot be masked there, because a run is resumed from and compared with what is
stored.
"""

from typing import Any

from ...launch.masking import is_secret, masked_command, secret_argument
from . import tree as config_tree

REASON = (
    "and the config is written to the run folder. Let the code read it from an "
    "environment variable or a file."
)


def check_flag(text: str) -> None:
    """Raises for a secret in --set NAME=VALUE, before any message can repeat it."""
    if shown := secret_argument([text]):
        raise ValueError(f"--set {shown} looks like a secret, {REASON}")


def shown_flag(text: str) -> str:
    """Returns --set NAME=VALUE for messages and origins, with secrets masked."""
    return f"--set {masked_command([text])[0]}"


def check(config: Any) -> None:
    """Raises for a value that looks like a secret."""
    for path, value in config_tree.flatten(config).items():
        if isinstance(value, str) and is_secret(path.rpartition(".")[2], value):
            raise ValueError(f"config value {path} looks like a secret, {REASON}")
