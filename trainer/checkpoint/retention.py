"""Which checkpoints are kept, by orbax's policies: any one of them keeps a step."""

import dataclasses
from collections.abc import Callable, Sequence

import orbax.checkpoint as ocp

policies = ocp.checkpoint_managers


def policy(
    *,
    last: int | None,
    every: int,
    best: int,
    loss_of: Callable[[int], float | None],
) -> policies.PreservationPolicy:
    """The policy of a run.

    Args:
      last: how many of the newest are kept; None keeps all.
      every: steps that are multiples of it are kept; 0 for none.
      best: how many of those with the lowest loss are kept.
      loss_of: the held-out loss of a step; None where it was not measured.
    """
    chosen: list[policies.PreservationPolicy] = [policies.LatestN(last)]
    if every:
        chosen.append(policies.EveryNSteps(every))
    if best:
        chosen.append(LowestLoss(best, loss_of))
    return policies.AnyPreservationPolicy(chosen)


@dataclasses.dataclass
class LowestLoss:
    """Keeps the n steps with the lowest loss, the newer of equals.

    Orbax's BestN would keep steps without a loss too while there are few steps, and
    reads losses from a file of its own, of which a torn one stops the start of a run.
    Ours stand in the manifest.
    """

    n: int
    loss_of: Callable[[int], float | None]

    def should_preserve(
        self,
        checkpoints: Sequence[policies.PolicyCheckpointInfo],
        *,
        context: policies.PreservationContext,
    ) -> Sequence[bool]:
        del context
        steps = [info.step for info in checkpoints]
        losses = {step: self.loss_of(step) for step in steps}
        rated = sorted(
            (loss, -step) for step, loss in losses.items() if loss is not None
        )
        kept = {-step for _, step in rated[: self.n]}
        return [step in kept for step in steps]
