"""Collects the signals that tell a supervisor to stop."""

import signal
import time

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Catches signals while it is entered; must be entered in the main thread.

    Args:
      repeat_seconds: a second signal within this time counts as the first one.

    Attributes:
      told: the signals, in the order in which they came.
    """

    def __init__(self, repeat_seconds: float):
        self.told: list[int] = []
        self._repeat_seconds, self._told_at = repeat_seconds, 0.0

    def __enter__(self):
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:  # as SIGHUP is under nohup
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _) -> None:
        now = time.monotonic()
        if not self.told:
            self._told_at = now
        elif now - self._told_at < self._repeat_seconds:
            return
        self.told.append(number)
