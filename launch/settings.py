"""How a group of workers is run, checked."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a group is run; times are in seconds.

    Attributes:
      min_processes: the group may shrink to this many; None keeps it whole.
      max_restarts: how many may follow each other without progress.
      stall_seconds: without progress after the first step; None is 90, or 15 times the
        median between two reports if that is more.
      start_seconds: without progress before the first step, which is compiled.
      grace_seconds: for workers that were told to save and leave.
      end_seconds: for the others after a death. Short: they can save nothing without
        the dead one, and jax swallows the SIGTERM.
      repeat_seconds: within this time a second signal to stop is the first one again.
        GNU timeout sends each twice, and schedulers may signal every process of a job.
      first_delay, longest_delay: before the second restart without progress, from
        which on it doubles; the first comes at once.
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
                f"{self.processes}; it is what the group may shrink to"
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
