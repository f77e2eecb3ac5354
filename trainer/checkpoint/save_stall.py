"""How long a save holds training up, and by what."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Stall:
    """Seconds of one save, from training stopped to training goes on.

    Attributes:
      waited_s: for the save before, which was still running.
      copy_s: from the devices to the host; on disk it goes in the background.
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

    def words(self) -> str:
        parts = f"digests {self.digests_s:.2f} s, copy {self.copy_s:.2f} s"
        if self.waited_for is not None:
            running = f"the save of step {self.waited_for} was still running"
            parts = f"{running}: waited {self.waited_s:.2f} s; {parts}"
        return f"saving held training up for {self.stall_s:.2f} s ({parts})"
