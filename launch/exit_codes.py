"""Exit codes: what workers tell the supervisor, and what it tells its caller.

| exit code of a worker | meaning | what the supervisor does |
|---|---|---|
| 0 | done | waits for the others; done when all are |
| 2 | something that the user must fix | ends the group, no restart |
| 69 | a host, process or storage is unreachable | ends the group, restarts |
| 75 | preempted: saved and exited on SIGTERM | lets the others save, restarts |
| 76 | ended by its own watchdog | ends the group, restarts |
| any other, or a signal | it died | ends the group, restarts |

| exit code of the supervisor | meaning |
|---|---|
| 0 | all workers are done, whether or not it was told to stop |
| 1 | too many restarts without progress |
| 2 | bad input: its own, or a worker's |
| 75 | told to stop, and every worker saved and exited, or was done |
| 129, 130, 143 | stopped by SIGHUP, SIGINT, SIGTERM; not every worker saved |
"""

import dataclasses
import signal
from collections.abc import Iterable, Sequence

DONE, GAVE_UP, BAD_INPUT, UNREACHABLE, PREEMPTED, WATCHDOG = 0, 1, 2, 69, 75, 76

MEANINGS = {
    BAD_INPUT: "bad input",
    UNREACHABLE: "a host, process or storage is unreachable",
    PREEMPTED: "preempted",
    WATCHDOG: "its watchdog saw no progress",
}


class Unreachable(Exception):
    """Something outside this process is missing, and may be there at the next attempt.

    The process exits with UNREACHABLE, and a supervisor restarts the group.
    """


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a worker ended.

    Attributes:
      status: exit code as `subprocess` gives it; negative for a signal.
      step: the last step that the worker reported, if any.
      name: its name in messages; "" for "worker N".
      host: where it ran, if not on this host.
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
        return f"{who} {_describe(self.status)}{where}"


def _describe(status: int) -> str:
    if status < 0:
        return f"was killed by signal {-status} ({signal_name(-status)})"
    meaning = f" ({MEANINGS[status]})" if status in MEANINGS else ""
    return f"exited with code {status}{meaning}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "unknown"


def cause(endings: Iterable[Ending]) -> Ending | None:
    """Returns the ending that most likely caused the others; None if all are done.

    Among deaths seen together: jax aborts when a peer or the coordinator has died, so
    SIGABRT is usually a consequence, and so is a plain error. Any other signal came
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
    """Returns the supervisor's exit code after signal `told`, given its workers'."""
    if statuses and all(status == DONE for status in statuses):
        return DONE
    if statuses and all(status in (DONE, PREEMPTED) for status in statuses):
        return PREEMPTED
    return 128 + told
