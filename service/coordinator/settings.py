"""What a job is given besides its spec."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from .log import Log


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How patient a job is, and how often it saves.

    Attributes:
      lease_seconds: who was not heard of for so long counts as lost.
      failover_seconds: the same for servers that hold no only copy of a block.
      rejoin_seconds: how long learners may take to find a service that restarted.
      save_every: commits between checkpoints.
      keep_checkpoints: how many are kept; a damaged one is replaced by an older one.
    """

    lease_seconds: float = 10.0
    failover_seconds: float = 5.0
    rejoin_seconds: float = 60.0
    save_every: int = 100
    keep_checkpoints: int = 3


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a job is given: where it writes, and how it tells the time and the user."""

    folder: Path
    log: Log
    clock: Callable[[], float]
    say: Callable[[str], None]
    settings: Settings
