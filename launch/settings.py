"""The settings of a group of workers, validated."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a group is run; times are in seconds.

    Attributes:
      min_processes: the group may shrink to this many; None keeps all of them.
      max_restarts: the limit on restarts in a row without progress.
      stall_seconds: the limit without progress after the first step; None for 90, or 15
        times the median time between two reports if that is more.
      start_seconds: the limit without progress before the first step, which compiles.
      grace_seconds: how long workers may take to save and exit when told to.
      end_seconds: how long the others may take after a death. Short: they cannot save
        without the dead one, and jax swallows the SIGTERM.
      repeat_seconds: a second stop signal within this time counts as the first one. GNU
        timeout sends each signal twice, and schedulers may signal every process.
      first_delay, longest_delay: the first restart without progress is immediate, the
        second waits `first_delay`, and each later one twice as long as the last.
    """

    processes: int
    min_processes: int | None = None
    max_restarts: int = 5
    stall_seconds: float | None = None
    start_seconds: float = 600.0
    grace_seconds: float = 60.0
    end_seconds: float = 0.5
    repeat_seconds: float = 1.0
    first_delay: float = 1.0
    longest_delay: float = 30.0
    poll_seconds: float = 0.1

    def __post_init__(self):
        for name in ("processes", "min_processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {value}")
        if self.min_processes is not None and self.min_processes > self.processes:
            raise ValueError(
                f"--min-processes is {self.min_processes}, more than --processes "
                f"{self.processes}; it is the size that the group may shrink to"
            )
        if self.max_restarts < 0:
            raise ValueError(
                f"--max-restarts must not be negative, got {self.max_restarts}"
            )
        for name in ("stall_seconds", "start_seconds", "grace_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{_flag(name)} must be more than 0, got {value:g}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
