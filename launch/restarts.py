"""Decides whether, when and with how many processes to restart a group that died."""

import dataclasses

from .exit_codes import BAD_INPUT, GAVE_UP, Ending

# If the same worker dies this many times in a row without progress, the job continues
# without it.
DEATHS_TO_SHRINK = 2


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do after a death: end with `status`, or restart after `delay` seconds."""

    message: str
    status: int | None = None
    delay: float = 0.0


class Restarts:
    """Counts restarts without progress, and chooses the number of processes.

    A new size resets the count. Sizes that the command refuses (exit code 2, for
    instance if the devices do not divide the batch) are skipped when the group shrinks;
    a refused size that the user requested is reverted.
    """

    def __init__(
        self,
        size: int,
        *,
        least: int,
        limit: int,
        first_delay: float = 1.0,
        longest_delay: float = 30.0,
    ):
        self.size = size
        self._least, self._limit = least, limit
        self._first_delay, self._longest_delay = first_delay, longest_delay
        self._count = 0
        self._progressed = False  # in this attempt
        self._deaths = 0  # in a row before any progress, of the worker below
        self._suspect: int | None = None
        self._others: list[int] = []  # sizes to try if this one is refused

    def begin(self) -> None:
        self._progressed = False

    def progress(self) -> None:
        self._progressed = True
        self._count = self._deaths = 0
        self._others = []

    def resize(self, size: int) -> None:
        """Takes the size that the user requested."""
        self._change(size, others=[self.size])

    def after(
        self, death: Ending | None, restarting: str = "restarting all"
    ) -> Decision:
        """Decides after a death, or after a stall (None), which no worker caused.

        Args:
          restarting: what a restart is called in the message.
        """
        if death is not None and death.status == BAD_INPUT:
            return self._after_refusal()
        self._count_death(death)
        if self._deaths >= DEATHS_TO_SHRINK and self.size > self._least:
            worker, size = self._suspect, self.size - 1
            self._change(size, others=list(range(size - 1, self._least - 1, -1)))
            return self._restart(
                f"worker {worker} cannot come back; continuing with {size} of "
                f"{size + 1} processes"
            )
        self._count += 1
        if self._count > self._limit:
            return Decision(f"giving up, {_times(self._limit)}", GAVE_UP)
        return self._restart(
            restarting, f" ({self._count} of {self._limit} without progress)"
        )

    def _count_death(self, death: Ending | None) -> None:
        if death is None or self._progressed:
            self._deaths, self._suspect = 0, None
        elif death.worker == self._suspect:
            self._deaths += 1
        else:
            self._deaths, self._suspect = 1, death.worker

    def _after_refusal(self) -> Decision:
        if not self._others:
            return Decision("not restarting", BAD_INPUT)
        refused = self.size
        size, *others = self._others
        self._change(size, others)
        return self._restart(
            f"{refused} processes are refused; continuing with {self.size}"
        )

    def _change(self, size: int, others: list[int]) -> None:
        self.size, self._others = size, others
        self._count = self._deaths = 0
        self._suspect = None

    def _restart(self, what: str, how_often: str = "") -> Decision:
        return Decision(f"{what} {_when(self._delay)}{how_often}", delay=self._delay)

    @property
    def _delay(self) -> float:
        """0 after a first death; longer after each further one without progress."""
        if self._count < 2:
            return 0.0
        return min(
            self._first_delay * 2 ** min(self._count - 2, 30), self._longest_delay
        )


def _when(delay: float) -> str:
    return f"in {delay:g} s" if delay else "at once"


def _times(limit: int) -> str:
    if not limit:
        return "no restart is allowed"
    return f"{limit} restart{'s' * (limit > 1)} without progress"
