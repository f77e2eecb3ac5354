"""Exit statuses: what workers tell the supervisor, and what it tells its caller.

| status of a worker | means | what the supervisor does |
|---|---|---|
| 0 | done | waits for the others; done when all are |
| 2 | what the user must fix | ends the group, no restart |
| 69 | a host, process or storage cannot be reached | ends the group, restarts |
| 75 | preempted: saved and left on SIGTERM | lets the others save, restarts |
| 76 | its own watchdog ended it | ends the group, restarts |
| any other, or a signal | a death | ends the group, restarts |

| status of the supervisor | means |
|---|---|
| 0 | all workers are done, told to stop or not |
| 1 | too many restarts without progress |
| 2 | bad input: its own, or that of a worker |
| 75 | told to stop, and every worker has saved and left, or was done |
| 129, 130, 143 | told to stop by SIGHUP, SIGINT, SIGTERM; not every worker has saved |
"""

import dataclasses
import signal
from collections.abc import Iterable, Sequence

DONE, GAVE_UP, BAD_INPUT, UNREACHABLE, PREEMPTED, WATCHDOG = 0, 1, 2, 69, 75, 76

MEANINGS = {
    BAD_INPUT: "bad input",
    UNREACHABLE: "a host, process or storage cannot be reached",
    PREEMPTED: "preempted",
    WATCHDOG: "its watchdog saw no progress",
}


class Unreachable(Exception):
    """Something outside of this process is not there, and may be at the next attempt.

    The status is UNREACHABLE, after which a supervisor starts all again.
    """


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a worker ended.

    Attributes:
      status: as `subprocess` gives it; negative for a signal.
      step: the last that the worker reported, if any.
      name: what messages call it; "" for its number.
      host: where it ran, if that was elsewhere.
    """

    worker: int
    status: int
    step: int | None = None
    name: str = ""
    host: str = ""

    def __str__(self) -> str:
        where = "" if self.step is None else f" at step {self.step}"
        who = self.name or f"worker {self.worker}"
        who += f" on {self.host}" * bool(self.host)
        return f"{who} {_words(self.status)}{where}"


def _words(status: int) -> str:
    if status < 0:
        return f"was killed by signal {-status} ({signal_name(-status)})"
    meaning = f" ({MEANINGS[status]})" if status in MEANINGS else ""
    return f"ended with status {status}{meaning}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "no name"


def cause(endings: Iterable[Ending]) -> Ending | None:
    """The ending that most likely brought about the others; None if all are done.

    Deaths that are seen together: jax aborts where a peer or the coordinator has died,
    so SIGABRT is mostly a consequence, and so is a plain error. Any other signal came
    from outside.
    """
    failed = [ending for ending in endings if ending.status != DONE]
    return min(failed, key=_rank, default=None)


def _rank(ending: Ending) -> tuple[int, int]:
    order: Sequence[bool] = (
        ending.status < 0 and ending.status != -signal.SIGABRT,
        ending.status == UNREACHABLE,
        ending.status == BAD_INPUT,
        ending.status == WATCHDOG,
        ending.status == PREEMPTED,
        ending.status > 0,
        True,
    )
    return order.index(True), ending.worker


def after_stop(statuses: Sequence[int], told: int) -> int:
    """The supervisor's status after signal `told`, by how its workers ended."""
    if statuses and all(status == DONE for status in statuses):
        return DONE
    if statuses and all(status in (DONE, PREEMPTED) for status in statuses):
        return PREEMPTED
    return 128 + told
