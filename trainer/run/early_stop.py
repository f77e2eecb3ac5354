"""Ends a run when its held-out loss no longer falls.

The decision is a function of the evaluations. What they amount to is saved with every
checkpoint, so a run that is restarted ends at the same step.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...service.rounds.plateau import Plateau, StopRule
from ..checkpoint.manifest import EVALUATED
from ..checkpoint.restore import Position
from ..job.group import Group

if TYPE_CHECKING:
    from .learner import Learner
    from .train import Config


class EarlyStop:
    """Counts evaluations without a lower loss.

    Args:
      rule: None never ends the run.
      saved: what `metadata` returned when the state was saved.
      has_ended: another reason why the run may be over.
      on_end: called with the step and the reason once the rule ends the run.

    Attributes:
      reason: why the rule has ended the run, or None.
    """

    def __init__(
        self,
        rule: StopRule | None,
        group: Group,
        saved: dict[str, Any] | None = None,
        has_ended: Callable[[], bool] = lambda: False,
        on_end: Callable[[int, str], None] = lambda step, reason: None,
    ):
        self._rule, self._group = rule, group
        self._has_ended, self._on_end = has_ended, on_end
        self._plateau = Plateau(**(saved or {}))
        self.reason = rule.reason(self._plateau) if rule else None

    @classmethod
    def of(
        cls,
        config: "Config",
        group: Group,
        position: Position,
        learner: "Learner | None",
        on_end: Callable[[int, str], None],
    ) -> "EarlyStop":
        """Returns what ends a run from a position on; a learner ends by the service."""
        if learner is not None:
            return cls(None, group, has_ended=learner.has_ended)
        return cls(config.stop_rule, group, position.evaluated, on_end=on_end)

    def __call__(self, step: int, loss: float) -> None:
        """Takes an evaluation; every process must call this."""
        if self._rule is None:
            return
        # The loss of process 0, so that all decide alike.
        loss = self._group.consult(
            "held-out loss", {"loss": loss}, lambda reports: reports[0]
        )["loss"]
        self._plateau = self._plateau.evaluated(step, loss, self._rule.min_change)
        reason = self._rule.reason(self._plateau)
        if reason is not None and self.reason is None:
            self.reason = reason
            self._on_end(step, reason)

    def is_over(self) -> bool:
        return self.reason is not None or self._has_ended()

    def metadata(self) -> dict[str, Any]:
        """Returns what goes into the manifest of a checkpoint."""
        return {EVALUATED: self._plateau.to_json()} if self._rule else {}


NEVER = EarlyStop(None, Group())


def complete(
    config: "Config", position: Position, learner: "Learner | None"
) -> str | None:
    """Returns a line that says why there are no steps left, or None if there are."""
    if learner is not None and learner.is_done and learner.why_ended:
        return f"This training is complete: {learner.why_ended}."
    line = f"This run is complete at step {position.step}"
    if position.step >= config.num_steps:
        return f"{line}."
    if learner is not None or config.stop_rule is None:
        return None
    reason = EarlyStop(config.stop_rule, Group(), position.evaluated).reason
    return f"{line}: {reason}. To continue, raise stop_patience." if reason else None


def check(config: "Config") -> None:
    """Raises if the settings for stopping early cannot work."""
    if config.stop_patience < 0:
        raise ValueError(
            f"stop_patience must be >= 0, got {config.stop_patience}; 0 trains for "
            "num_steps"
        )
    if not config.stop_min_change >= 0:
        raise ValueError(f"stop_min_change must be >= 0, got {config.stop_min_change}")
    if not config.stop_patience:
        if config.stop_min_change:
            raise ValueError(
                f"stop_min_change={config.stop_min_change} has no effect without "
                "stop_patience; set it to a number of evaluations"
            )
        return
    if config.eval_batches == 0 or config.eval_every == 0:
        name = "eval_batches" if config.eval_batches == 0 else "eval_every"
        raise ValueError(
            f"stop_patience={config.stop_patience} counts evaluations, but {name}=0 "
            f"means there are none before the end. Set {name}, or stop_patience=0."
        )
