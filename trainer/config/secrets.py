"""No secret may stand in a config: it is written to where many read.

Run folders, checkpoints and reports hold the config, and it cannot be masked there: a
run is continued, and compared, with what they hold.
"""

from typing import Any

from ...launch.masking import holds_password, looks_secret, masked_command
from . import tree as config_tree

REASON = (
    "expected none, as the config is written into the run folder. Let the code read it "
    "from an environment variable or a file."
)


def refuse_in_flag(text: str) -> None:
    """Refuses --set NAME=VALUE before any error can repeat the value."""
    (shown,) = masked_command([text])
    if shown != text:
        raise ValueError(f"--set {shown} holds a secret, as it seems; {REASON}")


def refuse(config: Any) -> None:
    """Refuses a value that is a secret by its name, or an address with a password."""
    for path, value in config_tree.flatten(config).items():
        if not isinstance(value, str) or not value:
            continue
        if looks_secret(path.rpartition(".")[2]) or holds_password(value):
            raise ValueError(
                f"config value {path} holds a secret, as it seems; {REASON}"
            )
