"""Early stopping: whether a loss that is evaluated now and then still falls."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Plateau:
    """What the evaluations so far amount to; goes to JSON and back.

    Attributes:
      step: of the newest evaluation.
      loss: the lowest one, which the next has to fall below; None before the first.
      loss_step: where it was measured.
      since: the number of evaluations after it.
    """

    step: int = -1
    loss: float | None = None
    loss_step: int = -1
    since: int = 0

    def evaluated(self, step: int, loss: float, min_change: float) -> "Plateau":
        """Returns the state after one more evaluation.

        An evaluation of a step that is not newer is repeated, and changes nothing.
        """
        if step <= self.step:
            return self
        is_lower = self.loss is None or loss < self.loss - min_change
        if math.isfinite(loss) and is_lower:
            return Plateau(step, loss, step)
        return dataclasses.replace(self, step=step, since=self.since + 1)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class StopRule:
    """When to stop.

    Attributes:
      patience: stop after so many evaluations in a row without a lower loss.
      min_change: a loss is lower if it is by more than this.
    """

    patience: int
    min_change: float = 0.0

    def __post_init__(self):
        if type(self.patience) is not int or self.patience < 1:
            raise ValueError(f"patience must be an integer >= 1, got {self.patience!r}")
        is_number = isinstance(self.min_change, int | float)
        if not is_number or not 0 <= self.min_change < math.inf:
            raise ValueError(f"min_change must be >= 0, got {self.min_change!r}")

    def reason(self, plateau: Plateau) -> str | None:
        """Returns why to stop, or None."""
        if plateau.since < self.patience:
            return None
        count = f"{plateau.since} evaluation{'s' if plateau.since > 1 else ''}"
        if plateau.loss is None:
            return f"the held-out loss was not finite in {count}"
        by = f" by more than {self.min_change:g}" if self.min_change else ""
        return (
            f"in {count} the held-out loss did not fall{by} below {plateau.loss:.4f}, "
            f"its value at step {plateau.loss_step}"
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StopRule":
        """Makes the rule that `dataclasses.asdict` wrote; raises ValueError."""
        names = {field.name for field in dataclasses.fields(cls)}
        if wrong := names ^ set(data):
            raise ValueError(f"stop: fields {sorted(wrong)} are missing or unknown")
        return cls(**data)
