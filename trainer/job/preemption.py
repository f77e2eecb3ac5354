"""Preemption: the first signal asks a run to save and leave, the second ends it.

SIGTERM comes from schedulers, SIGINT from Ctrl-C. SIGUSR1 asks the same and never ends
the process: mpirun and srun pass it on to every process, but kill all of them when they
are terminated themselves.

A scheduler signals one process or all, at any time, and all processes must save at the
same step. The process that was signaled sets a key in the group's store; a thread of
each process then reports how far it is, and all leave after the step that follows the
furthest. jax has such an agreement of its own, but it depends on the SIGTERM handler
that jax installs in C, which hides the second signal.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from .group import WAIT_SECONDS, Group

# Within this time a second signal is the first one again: GNU timeout sends each twice,
# and schedulers may signal every process of a job.
REPEAT_SECONDS = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ENDING = (signal.SIGTERM, signal.SIGINT)  # what ends the process the second time
# Keys in the store: that some process was signaled, and how far each one is. A job
# leaves once, so each key is used once.
LEAVE, STEPS = "leave", "leave_steps"
WATCH_SECONDS = 1.0


class Preempted(Exception):
    """The run was asked to leave, and has saved."""

    def __init__(self, step: int):
        super().__init__(f"told to stop: saved at step {step}")
        self.step = step


@contextlib.contextmanager
def listening(
    group: Group, end: Callable[[int], object]
) -> Iterator[Callable[[int], bool]]:
    """Handles the signals and yields a function of the step: whether to leave after it.

    It must be called after every step, with the same steps in every process, and turns
    true at the same step in all of them. Only for the main thread.

    Args:
      end: ends this process at once with an exit code, on the second signal.
    """
    departure = _Together(group) if group.size > 1 else _Alone()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # A thread takes them: the main thread may be waiting for the devices.
    thread = threading.Thread(
        target=_listen,
        args=(reader, departure.tell, end),
        name="preemption",
        daemon=True,
    )
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield departure.after
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)
        departure.close()


class _Alone:
    """The departure of a run in one process."""

    def __init__(self):
        self._told = threading.Event()

    def tell(self) -> None:
        self._told.set()

    def after(self, step: int) -> bool:
        del step
        return self._told.is_set()

    def close(self) -> None:
        pass


class _Together:
    """The departure of a job: all processes leave after the same step."""

    def __init__(self, group: Group):
        self._group = group
        self._lock = threading.Lock()  # held while the processes agree
        self._step = 0
        self._last: int | None = None  # the step after which all leave
        self._closed = False
        self._thread = threading.Thread(
            target=self._watch, name="departure", daemon=True
        )
        self._thread.start()

    def tell(self) -> None:
        self._group.store.set(self._group.key(LEAVE), "signaled")

    def after(self, step: int) -> bool:
        with self._lock:
            self._step = step
            return self._last is not None and step >= self._last

    def close(self) -> None:
        self._closed = True
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed:
            try:
                key = self._group.key(LEAVE)
                if self._group.store.wait(key, WATCH_SECONDS) is None:
                    continue
            except RuntimeError:
                return  # the job is ending, and whoever waits for it reports why
            with self._lock:  # the loop waits until every process's thread is here
                self._last = _furthest(self._group, self._step) + 1
            return


def _furthest(group: Group, step: int) -> int:
    """Returns the largest of all processes' steps."""
    key = group.key(STEPS)
    group.store.set(f"{key}/{group.index}", str(step))
    group.store.barrier(key, WAIT_SECONDS)
    return max(map(int, group.store.values(key)))


def _listen(
    reader: int, tell: Callable[[], None], end: Callable[[int], object]
) -> None:
    first = None
    while number := os.read(reader, 1):
        if number[0] not in SIGNALS:
            continue  # of another handler in Python
        now = time.monotonic()
        name = signal.Signals(number[0]).name
        if first is None:
            first = now
            tell()
            again = "Ctrl-C again" if number[0] == signal.SIGINT else "SIGTERM"
            _say(f"{name}: saving after this step, then leaving; {again} ends at once")
        elif number[0] in ENDING and now - first > REPEAT_SECONDS:
            _say(f"second signal ({name}): ending at once")
            end(128 + number[0])


def _say(text: str) -> None:
    os.write(sys.__stderr__.fileno(), f"meshloom: {text}\n".encode())  # type: ignore
