"""What a job is given besides its spec."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .log import Log


class Say(Protocol):
    """Tells the user one line and records it as an event with fields.

    Without a text it is only recorded.
    """

    def __call__(self, text: str, event: str = "note", **fields: Any) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How patient a job is, and how often it saves.

    Attributes:
      lease_seconds: who sends no heartbeat for so long counts as lost.
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
    """What a job is given: where it writes, and how it tells the time and the user.

    Attributes:
      reached: called with "log" before a commit is written to the log, and with
        "logged" after; a drill may kill this process there.
    """

    folder: Path
    log: Log
    clock: Callable[[], float]
    say: Say
    settings: Settings
    reached: Callable[[str], None] = lambda point: None

    def log_commit(self, job: str, entry: dict[str, Any]) -> None:
        """Writes a commit to the log."""
        self.reached("log")
        self.log.append(job, "commit", entry)
        self.reached("logged")
