"""Time slots: processes that run only for a fixed share of a core each.

Learners on one machine share its cores, so stopping one of them would speed the
others up and hide what waiting for it costs. With slots, each process is stopped
(SIGSTOP) most of the time and continued (SIGCONT) for `share` of each period, one
after the other. As long as all shares together are less than the cores, nobody gains
by the stop of another. A process that is slowed by f runs in every f-th period only.
"""

import contextlib
import heapq
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path


class Slots:
    """Runs processes in time slots; a context manager, at whose end all run freely.

    Args:
      share: of each period in which a process runs.
      factors: how much slower each process is, by its number.
      period: seconds.
    """

    def __init__(
        self, share: float, factors: Mapping[int, float], period: float = 0.04
    ):
        self._share, self._factors, self._period = share, dict(factors), period
        self._fds: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.began: float | None = None  # Unix time
        self.seconds = dict.fromkeys(factors, 0.0)  # that each was allowed to run

    def __enter__(self) -> "Slots":
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def begin(self, pids: Mapping[int, int]) -> None:
        """Starts the slots of these processes, by their number."""
        # Descriptors of processes: a number may be given to another process.
        self._fds = {number: os.pidfd_open(pid) for number, pid in pids.items()}
        self.began = time.time()
        self._thread = threading.Thread(target=self._run, name="slots")
        self._thread.start()

    def end(self) -> None:
        """Lets all processes run; may be called again."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        for number in list(self._fds):
            self._send(number, signal.SIGCONT)
            os.close(self._fds.pop(number))

    def _run(self) -> None:
        now, gap = time.monotonic(), self._period / len(self._fds)
        # When, which process, when its slot was due, and since when it runs.
        events: list[tuple[float, int, float, float | None]] = [
            (now + i * gap, number, now + i * gap, None)
            for i, number in enumerate(self._fds)
        ]
        for number in self._fds:
            self._send(number, signal.SIGSTOP)
        while not self._ended.wait(max(0.0, events[0][0] - time.monotonic())):
            _, number, due, since = events[0]
            now = time.monotonic()
            if since is None:  # a slot that begins late is as long as the others
                self._send(number, signal.SIGCONT)
                end = now + self._share * self._period
                heapq.heapreplace(events, (end, number, due, now))
            else:
                self._send(number, signal.SIGSTOP)
                self.seconds[number] += now - since
                due = max(due + self._period * self._factors[number], now)
                heapq.heapreplace(events, (due, number, due, None))

    def _send(self, number: int, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._fds[number], which)


def core_ticks() -> tuple[int, ...]:
    """Returns the clock ticks since boot of all cores together, by what they did."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    # user, nice, system, idle, iowait, irq, softirq, steal
    return tuple(int(word) for word in line.split()[1:9])


def busy_share(before: tuple[int, ...], after: tuple[int, ...]) -> float:
    """Returns the share of the cores that had work between two calls of core_ticks.

    What a hypervisor took away counts as work.
    """
    # The kernel may take back some iowait (man 5 proc).
    ticks = [max(0, b - a) for a, b in zip(before, after, strict=True)]
    _, _, _, idle, iowait, *_ = ticks
    return (sum(ticks) - idle - iowait) / max(1, sum(ticks))
