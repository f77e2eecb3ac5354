"""The adaptive grace: how long after the quorum contributions usually arrive."""

import collections
import statistics

WINDOW = 64  # recent values that count


class Lags:
    """Recent lags of arrivals behind the quorum, and recent durations of rounds."""

    def __init__(self):
        self._lags: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._durations: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def add_lag(self, seconds: float) -> None:
        """Records how long after the quorum of its commit a contribution came."""
        self._lags.append(seconds)

    def add_duration(self, seconds: float) -> None:
        """Records the time from a learner's release to its contribution."""
        self._durations.append(seconds)

    @property
    def grace(self) -> float:
        """Median + 2 x MAD of the lags, at most the median round; 0 without lags.

        Lags longer than the median round do not count: whoever is that late cannot be
        waited for at a profit.
        """
        if not self._lags:
            return 0.0
        longest = statistics.median(self._durations)
        lags = [lag for lag in self._lags if lag <= longest]
        if not lags:
            return 0.0
        median = statistics.median(lags)
        deviation = statistics.median(abs(lag - median) for lag in lags)
        return min(median + 2 * deviation, longest)
