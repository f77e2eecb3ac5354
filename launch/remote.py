"""Runs a process on another host through ssh, and ends it when the supervisor is gone.

`remote.py near HOST SILENCE NAMES COMMAND... -- SSH...` runs next to the supervisor, as
one of its workers. It starts SSH..., which runs `remote.py far` on the host, and writes
to its stdin: one line of JSON with the command, the folder and the variables in NAMES
(on a command line, others could read their values); then an empty line every second as
a heartbeat; and "stop" when it is told to stop.

The far side runs the command, and kills it and its children when stdin closes or is
silent for SILENCE seconds: a host that was cut off must not carry on by itself, and
must be free when the job comes back. The exit code travels back through ssh.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

# As in exit_codes.py, which a script run by path cannot import; and ssh's own.
UNREACHABLE, SSH_FAILED = 69, 255
BEAT_SECONDS = 1.0


def near(
    host: str, silence: float, names: list[str], command: list[str], ssh: list[str]
) -> int:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    order = {
        "command": command,
        "folder": os.getcwd(),
        "silence": silence,
        "env": {name: os.environ[name] for name in names if name in os.environ},
    }
    process = subprocess.Popen(ssh, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # ssh has exited, and says why
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    while process.poll() is None:
        # One at a time, so that a signal that arrives in between is not lost.
        _beat(process.stdin.fileno(), b"stop\n" if told and told.pop() else b"\n")
        _wait(process, told)
    if process.returncode == SSH_FAILED:
        print(f"meshloom: cannot reach {host} with {ssh[0]}", file=sys.stderr)
        return UNREACHABLE
    return process.returncode


def _beat(fd: int, line: bytes) -> None:
    """Writes without blocking; an ssh that is stuck exits by itself, and says why."""
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(fd, line)


def _wait(process: subprocess.Popen, told: list[int]) -> None:
    """Waits until the next beat is due, ssh has exited, or we are told to stop."""
    deadline = time.monotonic() + BEAT_SECONDS
    while time.monotonic() < deadline and process.poll() is None and not told:
        time.sleep(0.05)


def far() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    first = sys.stdin.buffer.readline()
    if not first:
        return 0  # the other side is gone
    order = json.loads(first)
    try:
        os.chdir(order["folder"])
    except OSError as error:
        print(
            f"meshloom: {os.uname().nodename}: folder {order['folder']}: "
            f"{error.strerror}. It must exist on every host.",
            file=sys.stderr,
        )
        return 2
    guard = os.path.join(os.path.dirname(__file__), "guard.py")
    command = order["command"]
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", guard, "worker", str(os.getpid()), *command],
        env={**os.environ, **order["env"]},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _attend(child, order["silence"])
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _attend(child: subprocess.Popen, silence: float) -> None:
    """Waits until the child has exited, or must be killed."""
    heard = time.monotonic()
    while child.poll() is None:
        if select.select([0], [], [], 0.1)[0]:
            received = os.read(0, 65536)
            if not received:
                return
            heard = time.monotonic()
            if b"stop" in received:
                child.terminate()
        elif time.monotonic() - heard > silence:
            host = os.uname().nodename
            print(
                f"meshloom: {host}: no heartbeat for {silence:g} s, stopping",
                file=sys.stderr,
            )
            return


def _end(status: int) -> None:
    """Ends the way the process did, so that the supervisor sees a signal as one."""
    number = status - 128
    if number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "far":
        sys.exit(far())
    host, silence, names, *rest = sys.argv[2:]
    cut = len(rest) - rest[::-1].index("--") - 1
    _end(near(host, float(silence), names.split(","), rest[:cut], rest[cut + 1 :]))
