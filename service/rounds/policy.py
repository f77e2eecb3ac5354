"""Policies: when contributions are merged, and what the merged one is worth.

A mode is a preset of a `Policy`; every setting of it can be overridden.
"""

import dataclasses
from hashlib import blake2b
from typing import Any

from . import checks

ADAPTIVE = checks.ADAPTIVE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """The optimizer that the servers apply to the mean change of the parameters."""

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self):
        if not checks.is_number(self.learning_rate) or self.learning_rate <= 0:
            raise ValueError(
                f"outer.learning_rate must be a number > 0, got {self.learning_rate!r}"
            )
        if not checks.is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"outer.momentum must be in [0, 1), got {self.momentum!r}")
        if self.nesterov and not self.momentum:
            raise ValueError(
                "outer.nesterov needs outer.momentum > 0; set momentum=0.9, or "
                "nesterov=False"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """When the contributions of learners are merged, and with which weights.

    A round is one exchange. With several fragments a round exchanges one of them, so
    that all are exchanged once in `local_steps` updates.

    Attributes:
      local_steps: updates of a learner between two exchanges of the same parameters.
      quorum: contributions needed for a commit: a count (int), or a share of the live
        learners (float; 1.0 means all of them).
      grace: seconds to wait for more contributions after the quorum; "adaptive" takes
        the median + 2 x MAD of recent lags, but at most the median round.
      staleness: how many commits a contribution may be old, or, with late="wait", how
        many rounds a learner may be ahead of the slowest. None sets no bound.
      late: what happens to learners that are late: the others "wait", or the late
        contribution is "drop"ped, "merge"d with a discount, or "reuse"d in place of
        the next ones of its learner.
      weights: what a change of the parameters weighs in the mean.
      update: whether a commit of k of N learners is a "full" update, or k/N of one.
      wait: each push waits a random share of this many seconds.
      delay: local steps between sending a fragment and applying the merged one.
      mix: share of the merged value when it is applied; the rest is the learner's own.
      fragments: number of fragments that are exchanged in turn.
      compensation: lambda of DC-ASGD, g + lambda * g * g * (w - w_base).
      outer: None sends gradients, and the trainer's own optimizer runs on the servers.
        Otherwise learners send changes of the parameters.
      start_with: learners that must have joined before the first round begins; the
        others may join later. None waits for all of them.
    """

    local_steps: int = 1
    quorum: int | float = 1.0
    grace: float | str = 0.0
    staleness: int | None = 0
    late: str = "wait"
    weights: str = "tokens"
    update: str = "full"
    wait: float = 0.0
    delay: int = 0
    mix: float = 1.0
    fragments: int = 1
    compensation: float = 0.0
    outer: Outer | None = None
    start_with: int | None = None

    def __post_init__(self):
        if self.outer is not None and not isinstance(self.outer, Outer):
            raise ValueError(f"outer must be an Outer or None, got {self.outer!r}")
        checks.check_values(self)
        checks.check_payload(self)
        checks.check_lateness(self)
        checks.check_fragments(self)

    @property
    def is_lockstep(self) -> bool:
        """Whether all learners work on the same round: round = version + 1."""
        return self.staleness == 0 or self.late == "reuse"

    def check_learners(self, num_learners: int) -> None:
        """Raises ValueError if the quorum does not fit the number of learners."""
        if num_learners < 1:
            raise ValueError(f"num_learners must be >= 1, got {num_learners}")
        if (self.start_with or 1) > num_learners:
            raise ValueError(
                f"start_with={self.start_with} is larger than the number of learners, "
                f"{num_learners}; lower it, or leave it out to wait for all of them"
            )
        if isinstance(self.quorum, float):
            return
        if self.quorum > num_learners:
            raise ValueError(
                f"quorum={self.quorum} is larger than the number of learners, "
                f"{num_learners}; lower it, or give a share such as quorum=0.75"
            )
        if self.is_lockstep and self.late == "wait" and self.quorum < num_learners:
            raise ValueError(checks.quorum_needs_late(self.quorum))

    @property
    def counts_all(self) -> bool:
        """Whether every contribution of a round is part of its commit.

        Then a merger may add them up before the coordinator has decided.
        """
        return self.staleness == 0 and self.late == "wait"

    def coefficient(self, weight: float, steps: int) -> tuple[float, float]:
        """Returns the coefficient of a fresh contribution, and what it adds to the
        divisor."""
        if self.outer is None:  # the payload is a sum over tokens
            return 1.0, weight
        if self.weights == "equal":
            weight = 1.0
        elif self.weights == "tokens_squared_per_step":
            weight = weight * weight / steps
        return weight, weight

    def fragment_of(self, round: int) -> int:
        """Returns the fragment that a round (counted from 1) exchanges."""
        return (round - 1) % self.fragments

    def steps_before(self, round: int) -> int:
        """Returns the local steps that precede a round (counted from 1)."""
        turns, position = divmod(round - 1, self.fragments)
        return turns * self.local_steps + position * self.local_steps // self.fragments

    def steps_of(self, round: int) -> int:
        """Returns the number of local steps in a round."""
        return self.steps_before(round + 1) - self.steps_before(round)

    def num_rounds(self, num_steps: int) -> int:
        """Returns how many rounds `num_steps` local steps are; refuses a remainder."""
        turns, rest = divmod(num_steps, self.local_steps)
        if num_steps < 1 or rest:
            raise ValueError(
                f"num_steps={num_steps} is not a positive multiple of "
                f"local_steps={self.local_steps}; the last round would not be "
                "exchanged. Change one of them"
            )
        return turns * self.fragments

    def wait_seconds(self, seed: int, learner: int, round: int) -> float:
        """Returns the random wait before a push, the same on every call."""
        if not self.wait:
            return 0.0
        text = f"{seed}/{learner}/{round}".encode()
        number = int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
        return self.wait * number / 2**64

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Policy":
        """Makes a policy from the output of `to_json`."""
        _check_names("policy", data, cls)
        outer = data.get("outer")
        if outer is not None:
            _check_names("policy.outer", outer, Outer)
            outer = Outer(**outer)
        return cls(**{**data, "outer": outer})


_SGD = Outer(learning_rate=1.0)
_NESTEROV = Outer(learning_rate=0.7, momentum=0.9, nesterov=True)

PRESETS: dict[str, Policy] = {
    "sync": Policy(),
    "backup-workers": Policy(quorum=0.75, late="drop"),
    "stale-sync": Policy(quorum=1, staleness=4, update="share"),
    "half-sync": Policy(local_steps=8, wait=1.0, outer=_SGD),
    "async": Policy(quorum=1, staleness=None, update="share"),
    "local-sgd": Policy(local_steps=8, outer=_SGD),
    "diloco": Policy(local_steps=32, outer=_NESTEROV),
    "streaming-diloco": Policy(
        local_steps=32, fragments=4, delay=2, mix=0.5, outer=_NESTEROV
    ),
    "decoupled-diloco": Policy(
        local_steps=24,
        fragments=4,
        delay=2,
        mix=0.5,
        quorum=1,
        grace=ADAPTIVE,
        staleness=16,
        late="merge",
        weights="tokens_squared_per_step",
        # Otherwise each straggler alone would move the parameters as far as all
        # others together.
        update="share",
        outer=_NESTEROV,
    ),
}


def make_policy(mode: str, **overrides: Any) -> Policy:
    """Returns the preset of a mode with some settings changed."""
    if mode not in PRESETS:
        raise ValueError(f"mode {mode!r} is unknown; expected {', '.join(PRESETS)}")
    _check_names(f"mode {mode!r}", overrides, Policy)
    return dataclasses.replace(PRESETS[mode], **overrides)


def _check_names(where: str, given: dict[str, Any], cls: type) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(
            f"{where}: {unknown[0]!r} is not a setting; expected {', '.join(known)}"
        )
