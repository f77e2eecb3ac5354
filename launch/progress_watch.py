"""Watches the progress of a group: steps, not heartbeats."""

import collections
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

from .progress_file import Report

# The default limit: this much, or a multiple of the median time between two reports.
LEAST_SECONDS, MEDIANS = 60.0, 10
REMEMBERED = 1000


class Watch:
    """Tracks when the group last made progress, and how long it may take to make more.

    The workers of a job run in lockstep, so the group is watched as one: it has stalled
    when no worker reports anything new within the limit.

    Args:
      slack: factor on the default limit.
    """

    def __init__(
        self,
        *,
        stall_seconds: float | None,
        start_seconds: float,
        slack: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stall_seconds, self._start_seconds = stall_seconds, start_seconds
        self._slack, self._clock = slack, clock
        self._intervals: collections.deque[float] = collections.deque(maxlen=REMEMBERED)
        self.has_reports = False  # whether any worker ever reported, in any attempt
        self._to_beat: int | None = None  # step of any worker in any attempt
        self.begin()

    def begin(self) -> None:
        """Starts a new attempt, in which no worker has reported yet."""
        self._began = self._last = self._clock()
        self._reports: dict[int, Report] = {}
        self._times: dict[int, float] = {}

    @property
    def reports(self) -> Mapping[int, Report]:
        """The last report of each worker that has reported in this attempt."""
        return self._reports

    @property
    def step(self) -> int | None:
        """The furthest step of this attempt."""
        return furthest(self._reports.values())

    def see(self, worker: int, report: Report | None) -> bool:
        """Takes a worker's newest report; returns whether the job got further.

        Steps that are repeated after a restart are progress of the attempt but not of
        the job: otherwise a job that always dies at the same step would be restarted
        forever.
        """
        before = self._reports.get(worker)
        if report is None or report == before:
            return False
        now = self._clock()
        if before is not None and before.step is not None:
            self._intervals.append(now - self._times[worker])
        self._reports[worker], self._times[worker] = report, now
        self._last = now
        self.has_reports = True
        if report.step is None:
            return False
        further = self._to_beat is None or report.step > self._to_beat
        if further:
            self._to_beat = report.step
        return further

    def fall_back(self) -> None:
        """Notes that others made this attempt end, and may make the next begin earlier.

        That must get further than this attempt, and not further than any.
        """
        if self.step is not None:
            self._to_beat = self.step

    @property
    def silent_seconds(self) -> float:
        return self._clock() - self._last

    @property
    def limit(self) -> float:
        allowed = max((r.allow for r in self._reports.values()), default=0)
        if self.step is None:
            return max(self._start_seconds, allowed)
        if self._stall_seconds is not None:
            return max(self._stall_seconds, allowed)
        median = statistics.median(self._intervals) if self._intervals else 0
        return self._slack * max(LEAST_SECONDS, MEDIANS * median, allowed)

    @property
    def has_stalled(self) -> bool:
        return self.has_reports and self.silent_seconds > self.limit

    @property
    def only_checks_liveness(self) -> bool:
        """Whether to tell the user that this command reports no progress."""
        return not self.has_reports and self.silent_seconds > self._start_seconds

    def message(self) -> str:
        last = (
            "before the first step" if self.step is None else f"last step {self.step}"
        )
        return f"no progress for {self.silent_seconds:.0f} s, {last}"


def furthest(reports: Iterable[Report]) -> int | None:
    return max((r.step for r in reports if r.step is not None), default=None)
