"""Times of the startup phases of a process, for the ledger.

`meshloom drill` uses them to show where the time of a recovery goes.
"""

import time
from collections.abc import Callable

# In the order in which they are reached.
NAMES = ("imported", "joined", "ready", "restored", "compiled")


class Phases:
    """When this process finished each of its startup phases.

    Attributes:
      attempt: number of this attempt of the job, as counted by the supervisor.
      times: Unix times.
      cpu: CPU seconds of all threads of this process until then.
    """

    def __init__(self, attempt: int = 1, *, clock: Callable[[], float] = time.time):
        self.attempt, self._clock = attempt, clock
        self.times: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def reached(self, name: str) -> None:
        """Records the first time that a phase is finished."""
        assert name in NAMES, name
        self.times.setdefault(name, round(self._clock(), 3))
        self.cpu.setdefault(name, round(time.process_time(), 3))
