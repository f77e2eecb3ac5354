"""Which checkpoints are kept, as orbax policies: a step is kept if any one keeps it."""

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
    """Returns the preservation policy of a run.

    Args:
      last: how many of the newest are kept; None keeps all.
      every: steps that are multiples of it are kept; 0 for none.
      best: how many with the lowest loss are kept.
      loss_of: returns the held-out loss of a step; None if it was not measured.
    """
    chosen: list[policies.PreservationPolicy] = [policies.LatestN(last)]
    if every:
        chosen.append(policies.EveryNSteps(every))
    if best:
        chosen.append(LowestLoss(best, loss_of))
    return policies.AnyPreservationPolicy(chosen)


@dataclasses.dataclass
class LowestLoss:
    """Keeps the n steps with the lowest loss; of equals, the newer.

    Orbax's BestN also keeps steps without a loss while there are few steps, and reads
    losses from a file of its own, which prevents a run from starting if it is damaged.
    Ours are in the manifest.
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
        ranked = sorted(
            (loss, -step) for step, loss in losses.items() if loss is not None
        )
        kept = {-step for _, step in ranked[: self.n]}
        return [step in kept for step in steps]
