"""Preemption: the first signal makes a run save and stop, the second ends it at once.

SIGTERM comes from schedulers, SIGINT from Ctrl-C. SIGUSR1 asks for the same and never
ends the process: mpirun and srun forward it to every process, but kill all of them when
they are terminated themselves.

A scheduler may signal one process or all of them, at any time, and all processes must
save at the same step. The process that was signaled sets a key in the group's store; a
thread in each process then reports its step, and all stop one step after the furthest.
jax has such a protocol of its own, but it depends on the SIGTERM handler that jax
installs in C, which hides the second signal.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from .group import WAIT_SECONDS, Group

# A second signal within this time counts as the first: GNU timeout sends each twice,
# and schedulers may signal every process of a job.
REPEAT_SECONDS = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ENDING = (signal.SIGTERM, signal.SIGINT)  # these end the process the second time
# Keys in the store: some process was signaled; the step of each process. A job stops
# once, so each key is used once.
STOP, STEPS = "stop", "stop_steps"
WATCH_SECONDS = 1.0


class Preempted(Exception):
    """The run was asked to stop, and has saved."""

    def __init__(self, step: int):
        super().__init__(f"asked to stop: saved at step {step}")
        self.step = step


@contextlib.contextmanager
def listening(
    group: Group, end: Callable[[int], object]
) -> Iterator[Callable[[int], bool]]:
    """Handles the signals and yields a function of the step: whether to stop after it.

    It must be called after every step, with the same steps in every process, and turns
    true at the same step in all of them. Only for the main thread.

    Args:
      end: ends this process at once with an exit code, on the second signal.
    """
    stop = _JobStop(group) if group.size > 1 else _LocalStop()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # In a thread of its own: the main thread may be waiting for the devices.
    thread = threading.Thread(
        target=_listen,
        args=(reader, stop.request, end),
        name="preemption",
        daemon=True,
    )
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield stop.is_due
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)
        stop.close()


class _LocalStop:
    """Stops a run of one process."""

    def __init__(self):
        self._is_requested = threading.Event()

    def request(self) -> None:
        self._is_requested.set()

    def is_due(self, step: int) -> bool:
        del step
        return self._is_requested.is_set()

    def close(self) -> None:
        pass


class _JobStop:
    """Stops a job: all processes stop after the same step."""

    def __init__(self, group: Group):
        self._group = group
        self._lock = threading.Lock()  # held while the processes agree
        self._step = 0
        self._last_step: int | None = None  # the step after which all stop
        self._closed = False
        self._thread = threading.Thread(
            target=self._watch, name="preemption steps", daemon=True
        )
        self._thread.start()

    def request(self) -> None:
        self._group.store.set(self._group.key(STOP), "signaled")

    def is_due(self, step: int) -> bool:
        with self._lock:
            self._step = step
            return self._last_step is not None and step >= self._last_step

    def close(self) -> None:
        self._closed = True
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed:
            try:
                key = self._group.key(STOP)
                if self._group.store.wait(key, WATCH_SECONDS) is None:
                    continue
            except RuntimeError:
                return  # the job is ending; whoever waits for it reports why
            with (
                self._lock
            ):  # the loop waits until the threads of all processes are here
                self._last_step = _furthest(self._group, self._step) + 1
            return


def _furthest(group: Group, step: int) -> int:
    """Returns the largest step of any process."""
    key = group.key(STEPS)
    group.store.set(f"{key}/{group.index}", str(step))
    group.store.barrier(key, WAIT_SECONDS)
    return max(map(int, group.store.values(key)))


def _listen(
    reader: int, request: Callable[[], None], end: Callable[[int], object]
) -> None:
    first = None
    while number := os.read(reader, 1):
        if number[0] not in SIGNALS:
            continue  # a signal with another handler in Python
        now = time.monotonic()
        name = signal.Signals(number[0]).name
        if first is None:
            first = now
            request()
            again = "Ctrl-C again" if number[0] == signal.SIGINT else "SIGTERM"
            _log(f"{name}: saving after this step, then stopping; {again} exits now")
        elif number[0] in ENDING and now - first > REPEAT_SECONDS:
            _log(f"second signal ({name}): exiting now")
            end(128 + number[0])


def _log(text: str) -> None:
    os.write(sys.__stderr__.fileno(), f"meshloom: {text}\n".encode())  # type: ignore
