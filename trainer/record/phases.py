"""When the start of a process reached each of its phases, for the ledger.

`meshloom drill` shows from these where the seconds of a recovery go.
"""

import time
from collections.abc import Callable

# In the order in which a start reaches them.
NAMES = ("imported", "joined", "ready", "restored", "compiled")


class Phases:
    """When this process finished the phases of its start.

    Attributes:
      attempt: of the job, as its supervisor counts.
      times: Unix times.
      cpu: seconds that all threads of this process had computed by then.
    """

    def __init__(self, attempt: int = 1, *, clock: Callable[[], float] = time.time):
        self.attempt, self._clock = attempt, clock
        self.times: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    def reached(self, name: str) -> None:
        """Notes the first time that a phase is finished."""
        assert name in NAMES, name
        self.times.setdefault(name, round(self._clock(), 3))
        self.cpu.setdefault(name, round(time.process_time(), 3))
