"""The adaptive grace: how long after the quorum contributions usually arrive."""

import collections
import statistics

WINDOW = 64  # recent values that count
# Everybody else pays for a grace, and late contributions are not lost: lags above this
# share of the median round are those of stragglers, or of the round after.
LONGEST = 0.25
# Learners in step stay in step, also if one is a moment ahead of all others.
SHORTEST = 0.01


class Lags:
    """Recent lags of arrivals behind the quorum, and recent durations of rounds."""

    def __init__(self):
        self._lags: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._durations: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def add_lag(self, seconds: float) -> None:
        """Records how long after the last quorum a contribution came."""
        self._lags.append(seconds)

    def add_duration(self, seconds: float) -> None:
        """Records the time from a learner's release to its contribution."""
        self._durations.append(seconds)

    @property
    def grace(self) -> float:
        """Median + 2 x MAD of the lags, at most the median round."""
        if not self._durations:
            return 0.0
        round = statistics.median(self._durations)
        lags = [lag for lag in self._lags if lag <= LONGEST * round] or [0.0]
        median = statistics.median(lags)
        deviation = statistics.median(abs(lag - median) for lag in lags)
        return min(max(median + 2 * deviation, SHORTEST * round), round)
