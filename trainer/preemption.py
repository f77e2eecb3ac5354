"""Being told to leave: the first SIGTERM asks a run to save, the second ends it.

SIGUSR1 asks the same, and never ends: mpirun and srun pass it on to every process, but
have all of them killed where they are told to end themselves.

A scheduler sends SIGTERM to one process or to all, at any moment. All processes of a
job must save at the same step, so jax's own agreement is used where there are several:
its notice begins with the handler of SIGTERM that jax installs. Ours stands in front of
it, to see the second signal, and passes the first one on.

Signals are taken by a thread: the main thread may be waiting for the devices.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

# Within this time a second signal is the first one again: GNU timeout sends each twice,
# and schedulers may signal every process of a job.
REPEAT_SECONDS = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(Exception):
    """The run was told to leave, and has saved."""

    def __init__(self, step: int):
        super().__init__(f"told to stop: saved at step {step}")
        self.step = step


@contextlib.contextmanager
def listening() -> Iterator[Callable[[int], bool]]:
    """Takes the signals; gives a function of the step: whether to leave after it.

    It must be called after every step, with the same steps in all processes of a job,
    and is true at the same step in all of them. Only for the main thread.
    """
    notice = _handler_of_jax()
    told = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(
        target=_listen, args=(reader, told, notice), name="preemption", daemon=True
    )
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()

    def should_leave(step: int) -> bool:
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return told.is_set()

    try:
        yield should_leave
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()
        os.close(reader)


def _listen(reader: int, told: threading.Event, notice: Callable | None) -> None:
    first = None
    while number := os.read(reader, 1):
        if number[0] not in SIGNALS:
            continue  # of another handler in Python
        now = time.monotonic()
        if first is None:
            first = now
            told.set()
            if notice is not None:
                notice(signal.SIGTERM)
            name = signal.Signals(number[0]).name
            _say(f"{name}: saving after this step, then leaving; SIGTERM ends at once")
        elif number[0] == signal.SIGTERM and now - first > REPEAT_SECONDS:
            _say("second SIGTERM: ending at once")
            os._exit(128 + signal.SIGTERM)


def _say(text: str) -> None:
    os.write(sys.__stderr__.fileno(), f"meshloom: {text}\n".encode())  # type: ignore


def _handler_of_jax() -> Callable[[int], None] | None:
    """The handler that jax has installed in C; None where it has none."""
    if jax.process_count() == 1:
        return None
    # The handler is the first field of the structure, on Linux and macOS.
    action = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).sigaction(signal.SIGTERM, None, action):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    address = ctypes.c_void_p.from_buffer(action).value
    if not address:
        raise ValueError(
            "jax takes no SIGTERM in this job, so its processes could not agree when "
            "to save. Leave jax_enable_preemption_service on."
        )
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(address)
