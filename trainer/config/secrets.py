"""No secret may be in a config: run folders, checkpoints and reports hold it.

It cannot be masked there: a run is continued, and compared, with what they hold.
"""

from typing import Any

from ...launch.masking import is_secret, masked_command, secret_argument
from . import tree as config_tree

REASON = (
    "and the config is written into the run folder. Let the code read it from an "
    "environment variable or a file."
)


def refuse_in_flag(text: str) -> None:
    """Refuses --set NAME=VALUE before any error can repeat the value."""
    if shown := secret_argument([text]):
        raise ValueError(f"--set {shown} looks like a secret, {REASON}")


def shown_flag(text: str) -> str:
    """Returns --set NAME=VALUE for messages and origins."""
    return f"--set {masked_command([text])[0]}"


def refuse(config: Any) -> None:
    """Refuses a value that is certainly a secret."""
    for path, value in config_tree.flatten(config).items():
        if isinstance(value, str) and is_secret(path.rpartition(".")[2], value):
            raise ValueError(f"config value {path} looks like a secret, {REASON}")
