"""Counts failed steps: each is skipped, and too many in a row make the run rewind.

The step itself skips its update, on all devices (program/step.py). All processes see
the same metrics of the same steps, so all of them reach the same decision.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


class Rewind(Exception):
    """Too many steps in a row have failed, the last of them `step`."""

    def __init__(self, step: int, reason: str):
        super().__init__(reason)
        self.step, self.reason = step, reason


@dataclasses.dataclass
class FailedSteps:
    """Counts failed steps.

    Attributes:
      limit: this many in a row raise Rewind.
      log: called with a line about each failed step.
      consecutive: how many have failed in a row, up to the newest step.
      any_succeeded: whether any step has succeeded.
    """

    limit: int
    log: Callable[[str], None]
    consecutive: int = 0
    any_succeeded: bool = False

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Counts the next step; raises Rewind at the limit."""
        if not metrics["skipped"]:
            self.consecutive, self.any_succeeded = 0, True
            return
        self.consecutive += 1
        step = int(metrics["step"])
        loss, grad_norm = metrics["loss"], metrics["grad_norm"]
        reason = f"loss {loss:.6g}, gradient norm {grad_norm:.6g}"
        self.log(
            f"step {step} failed ({reason}): its update was skipped "
            f"({self.consecutive} in a row; limit {self.limit})"
        )
        if self.consecutive >= self.limit:
            raise Rewind(step, reason)


def give_up(rewind: Rewind, limit: int, num_rewinds: int) -> FloatingPointError:
    """Returns the error if rewinding did not help, or was not possible."""
    tried = "there is no earlier checkpoint to rewind to"
    if num_rewinds:
        tried = f"{num_rewinds} rewind{'s' * (num_rewinds > 1)} did not help"
    return FloatingPointError(
        f"{limit} steps in a row failed, the last at step {rewind.step} with "
        f"{rewind.reason}; {tried}. Lower the learning rate (schedule.peak), clip "
        "gradients (max_grad_norm), or inspect the data of these steps (ledger.jsonl)."
    )
