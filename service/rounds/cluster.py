"""What is simulated, learners and their links, and what comes out of it."""

import collections
import dataclasses
from typing import Any

from .events import Release


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Learners and their links.

    Attributes:
      step_seconds: of each learner.
      jitter: standard deviation of the logarithm of a round's duration.
      param_bytes: of all parameters, as they are sent.
      push_share: the size of what a learner sends, relative to these; less than 1 if
        it is compressed.
      pull_share: the size of one change that a learner receives, relative to these; 1
        if whole versions are sent.
      up, down: bytes a second on the link of a learner.
      latency: seconds a message takes.
      mean_uptime: seconds between failures of a learner; None: they never fail.
      restart_seconds: from a failure until the learner has joined again.
      lease_seconds: until a failure is noticed.
    """

    step_seconds: tuple[float, ...]
    jitter: float = 0.0
    param_bytes: int = 0
    push_share: float = 1.0
    pull_share: float = 1.0
    up: float = 1.25e8
    down: float = 1.25e8
    latency: float = 0.0
    mean_uptime: float | None = None
    restart_seconds: float = 60.0
    lease_seconds: float = 10.0
    seed: int = 0

    def __post_init__(self):
        if not self.step_seconds or min(self.step_seconds) <= 0:
            raise ValueError(f"step_seconds must be > 0, got {self.step_seconds}")
        for name in ("up", "down", "restart_seconds", "lease_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("jitter", "param_bytes", "push_share", "pull_share", "latency"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.mean_uptime is not None and self.mean_uptime <= 0:
            raise ValueError(f"mean_uptime must be > 0, got {self.mean_uptime}")


@dataclasses.dataclass(frozen=True)
class Segment:
    """What a learner did for a while: "compute", "send", "wait" or "down"."""

    learner: int
    kind: str
    start: float
    end: float


@dataclasses.dataclass
class Learner:
    """A learner in the simulation; sums are over the whole run."""

    index: int
    step_seconds: float
    incarnation: int = 0
    is_up: bool = False
    free: float = 0.0  # when it has nothing left to do without a release
    ahead: int = 0  # steps of the next round that it has done already
    release: Release | None = None
    bases: list[int] = dataclasses.field(default_factory=list)  # of each fragment
    plan: list[Segment] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    useful_steps: int = 0
    last_useful: float = 0.0  # when the last of them was committed
    is_done: bool = False
    bytes_up: float = 0.0
    bytes_down: float = 0.0

    @property
    def waiting(self) -> float:
        """Share of its time, until it finished, that was spent waiting."""
        return self.seconds["wait"] / sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A simulated run.

    Attributes:
      goodput: committed local steps a second, until the first learner has finished,
        over those of learners that never wait and never fail.
      staleness: contributions by how many commits of their fragment they were old.
      learners: for each, the seconds and bytes it spent.
      commits: when each commit happened.
      segments: what the learners did when, if it was recorded.
    """

    seconds: float
    num_commits: int
    num_contributions: int
    num_dropped: int
    num_failures: int
    goodput: float
    staleness: dict[int, int]
    learners: tuple[Learner, ...]
    commits: tuple[float, ...]
    segments: tuple[Segment, ...]

    @property
    def rounds_per_second(self) -> float:
        """Rounds that a learner has committed a second, on average."""
        return self.num_contributions / len(self.learners) / self.seconds

    @property
    def waiting(self) -> float:
        """Share of the learners' time, until they finish, that is spent waiting."""
        total = sum(sum(learner.seconds.values()) for learner in self.learners)
        return sum(learner.seconds["wait"] for learner in self.learners) / total

    @property
    def mean_staleness(self) -> float:
        count = sum(self.staleness.values())
        return sum(age * n for age, n in self.staleness.items()) / max(count, 1)

    def steps_per_second(self, learners: range) -> float:
        """Returns the steps a second of some learners, until their last commit."""
        chosen = [self.learners[i] for i in learners]
        seconds = max(learner.last_useful for learner in chosen)
        return sum(learner.useful_steps for learner in chosen) / seconds

    def to_json(self) -> dict[str, Any]:
        keys = ("seconds", "num_commits", "num_contributions", "num_dropped")
        found: dict[str, Any] = {key: getattr(self, key) for key in keys}
        return found | {
            "num_failures": self.num_failures,
            "goodput": self.goodput,
            "rounds_per_second": self.rounds_per_second,
            "waiting": self.waiting,
            "staleness": {str(age): n for age, n in sorted(self.staleness.items())},
            "learners": [
                {
                    "step_seconds": learner.step_seconds,
                    "waiting": learner.waiting,
                    "useful_steps": learner.useful_steps,
                    "bytes_up": learner.bytes_up,
                    "bytes_down": learner.bytes_down,
                }
                for learner in self.learners
            ],
        }
