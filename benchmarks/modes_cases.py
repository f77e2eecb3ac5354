"""What is trained to compare modes: a config, a mode, a seed, and how long."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from meshloom.service.rounds.policy import Policy, make_policy

# Learners train, and nothing else.
BARE = (
    *("eval_batches=0", "save_every=0", "check_replicas_every=0", "log_every=1"),
    *("sample_prompt=None", "test_batches=0"),
)


@dataclasses.dataclass(frozen=True)
class Size:
    """How long a config is trained, in steps of `sync`, and with which settings."""

    steps: int
    sets: tuple[str, ...] = ()


# Steps are multiples of 96, of which all presets' local steps are divisors.
SIZES = {
    "default": Size(96, ("data.length=128",)),
    "drill": Size(192),
    # The presets' own local steps, and no early end.
    "digits": Size(
        192, ("stop_patience=0", "stop_min_change=0.0", "exchange.local_steps=None")
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training to run.

    Attributes:
      steps: local steps of each learner.
      sets: bindings for `--set`.
      points: about how many versions are evaluated.
      share: of a core that each learner gets, in time slots; None for no limit.
      slow: how many learners are slowed, the last ones; by the factor `factor`.
    """

    config: str
    mode: str
    seed: int
    steps: int
    learners: int
    sets: tuple[str, ...] = ()
    points: int = 8
    share: float | None = None
    slow: int = 0
    factor: float = 1.0

    @property
    def name(self) -> str:
        kind = "" if self.share is None else "-slowed" if self.slow else "-even"
        return f"{self.config}-{self.mode}-{self.seed}{kind}"

    @property
    def policy(self) -> Policy:
        return make_policy(self.mode)

    @property
    def bindings(self) -> list[str]:
        """Returns all bindings, but those of the exchange."""
        own = [*BARE, *self.sets, f"seed={self.seed}", f"num_steps={self.steps}"]
        return own

    @property
    def factors(self) -> dict[int, float]:
        first = self.learners - self.slow
        return {i: self.factor if i >= first else 1.0 for i in range(self.learners)}

    def commits_between_points(self) -> int:
        """Returns after how many commits the service saves."""
        commits = self.policy.num_rounds(self.steps)
        if not self.policy.is_lockstep and self.policy.late != "merge":
            commits *= self.learners  # each contribution is one
        return max(commits // self.points, 1)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))


def num_steps(policy: Policy, steps: int, learners: int) -> int:
    """Returns the local steps with which a mode uses as many samples as `sync`.

    A commit that drops what is late has the samples of its quorum only, so there are
    more commits.
    """
    if not (policy.is_lockstep and policy.late == "drop"):
        return steps
    needed = policy.quorum
    if isinstance(needed, float):
        needed = max(math.ceil(needed * learners - 1e-9), 1)
    every = policy.local_steps
    return max(round(steps * learners / needed / every), 1) * every


def parse_slow(words: str) -> tuple[int, float]:
    """Returns how many learners are slow, and by which factor."""
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", words)
    if not match or int(match[1]) < 1 or float(match[2]) < 1:
        raise ValueError(
            f"--slow {words!r}: expected NUMBERxFACTOR, such as 1x4 for one learner "
            "that is four times slower"
        )
    return int(match[1]), float(match[2])


def all_cases(
    configs: Sequence[str],
    modes: Sequence[str],
    seeds: int,
    *,
    learners: int,
    steps: int | None,
    points: int,
    sets: Sequence[str],
    share: float,
    slow: tuple[int, float] | None,
) -> Iterator[Case]:
    """Yields what to train: seeds of a mode far from each other, sync first.

    Args:
      steps: of `sync`; None for those that are known for a config.
      slow: trains each case twice, in time slots: with all learners alike, and with
        some of them slowed.
    """
    for config in configs:
        size = SIZES.get(config)
        if size is None and steps is None:
            raise ValueError(
                f"config {config!r}: how long to train is only known for "
                f"{', '.join(SIZES)}; set --steps"
            )
        known = size or Size(0)
        for seed in range(seeds):
            for mode in modes:
                policy = make_policy(mode)
                policy.check_learners(learners)
                case = Case(
                    config=config,
                    mode=mode,
                    seed=seed,
                    steps=num_steps(policy, steps or known.steps, learners),
                    learners=learners,
                    sets=(*known.sets, *sets),
                    points=points,
                )
                policy.num_rounds(case.steps)  # raises if the last is not exchanged
                if slow is None:
                    yield case
                    continue
                if slow[0] >= learners:
                    raise ValueError(
                        f"--slow names {slow[0]} of {learners} learners; leave at "
                        "least one that is not slowed"
                    )
                even = dataclasses.replace(case, share=share)
                yield even
                yield dataclasses.replace(even, slow=slow[0], factor=slow[1])
