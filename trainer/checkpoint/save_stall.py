"""How long a save stalls training, and why."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stall:
    """How many seconds training paused for one save.

    Attributes:
      stall_s: the whole pause.
      digests_s: computing the digests of all arrays.
      waited_s: waiting for the previous save, which was still running.
      copy_s: copying from the devices to the host; writing happens in the background.
      waited_for: the step of the save that was still running; None if none was.
    """

    stall_s: float
    digests_s: float
    waited_s: float
    copy_s: float
    waited_for: int | None = None

    def seconds(self) -> dict[str, float]:
        facts = dataclasses.asdict(self)
        del facts["waited_for"]
        return {name: round(value, 6) for name, value in facts.items()}

    def describe(self) -> str:
        parts = f"digests {self.digests_s:.2f} s, copy {self.copy_s:.2f} s"
        if self.waited_for is not None:
            running = f"the save of step {self.waited_for} was still running"
            parts = f"{running}: waited {self.waited_s:.2f} s; {parts}"
        return f"saving stalled training for {self.stall_s:.2f} s ({parts})"
