"""What learners report of their evaluations, and whether they say that a job is over.

Reports are entries of the log. So what follows from them is the same after a restart,
and a report that is repeated counts once.
"""

from collections.abc import Mapping
from typing import Any

from ..rounds.plateau import Plateau, StopRule
from ..wire.errors import Refused
from .run_files import number, plain

Row = dict[str, Any]


def row_of(message: Mapping[str, Any], now: float) -> Row:
    """Returns the row that a report brings, for the log and the file."""
    row = message.get("row")
    if not isinstance(row, Mapping) or type(row.get("step")) is not int:
        raise Refused(f"row is {row!r}, expected an object with an integer step")
    try:
        _loss(row)
    except (TypeError, ValueError):
        raise Refused(f"row has loss {row['loss']!r}, expected a number") from None
    return plain({**row, "time": round(now, 3)})


class Evaluations:
    """The evaluations of a job, in the order of its log.

    Args:
      rule: when to stop; None for never.
    """

    def __init__(self, rule: StopRule | None):
        self._rule, self._plateau = rule, Plateau()
        self._newest = -1

    def is_new(self, row: Row) -> bool:
        """Returns whether a row is not of a step that was reported before.

        A learner repeats a report that was not answered in time, and evaluates steps
        again that it lost when it died.
        """
        return _local_step(row) > self._newest

    def add(self, row: Row) -> None:
        if not self.is_new(row):
            return
        self._newest = _local_step(row)
        loss = _loss(row)
        # Learners evaluate the final parameters too: the reason stays what it was.
        if self._rule is not None and loss is not None and self.reason is None:
            self._plateau = self._plateau.evaluated(
                self._newest, loss, self._rule.min_change
            )

    @property
    def reason(self) -> str | None:
        """Why the job should stop, or None."""
        return None if self._rule is None else self._rule.reason(self._plateau)


def _local_step(row: Mapping[str, Any]) -> int:
    step = row.get("local_step", row["step"])
    return step if type(step) is int else row["step"]


def _loss(row: Mapping[str, Any]) -> float | None:
    loss = row.get("loss")
    return None if loss is None else number(loss)
