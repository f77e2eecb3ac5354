"""Steps that failed: each is left out, and too many in a row make the run rewind.

The step itself leaves its update out, on all devices alike (program/step.py). Here they
are counted. All processes see the same figures of the same steps, so all decide alike.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


class Rewind(Exception):
    """Too many failed steps in a row, the last of them `step`."""

    def __init__(self, step: int, words: str):
        super().__init__(words)
        self.step, self.words = step, words


@dataclasses.dataclass
class FailedSteps:
    """Counts failed steps.

    Attributes:
      limit: so many in a row raise Rewind.
      say: takes a line for a person.
      in_a_row: up to the newest step that is known.
      any_good: whether a step went well since this began.
    """

    limit: int
    say: Callable[[str], None]
    in_a_row: int = 0
    any_good: bool = False

    def see(self, row: Mapping[str, Any]) -> None:
        """Takes the figures of the next step."""
        if not row["skipped"]:
            self.in_a_row, self.any_good = 0, True
            return
        self.in_a_row += 1
        step = int(row["step"])
        words = f"loss {row['loss']:.6g}, gradient's norm {row['grad_norm']:.6g}"
        self.say(
            f"step {step} failed ({words}): its update is left out "
            f"({self.in_a_row} in a row of {self.limit})"
        )
        if self.in_a_row >= self.limit:
            raise Rewind(step, words)


def give_up(rewind: Rewind, limit: int, num_rewinds: int) -> FloatingPointError:
    """The error where rewinding did not help, or there is nothing to rewind to."""
    tried = "no earlier checkpoint is there to rewind to"
    if num_rewinds:
        tried = f"{num_rewinds} rewind{'s' * (num_rewinds > 1)} did not help"
    return FloatingPointError(
        f"{limit} steps in a row failed, the last at step {rewind.step} with "
        f"{rewind.words}; {tried}. Lower the learning rate (schedule.peak), clip "
        "gradients (max_grad_norm), or look at the data of these steps (ledger.jsonl)."
    )
