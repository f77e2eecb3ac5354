"""A process on another host, reached by ssh, that ends when nobody wants it any more.

`remote.py near HOST SILENCE NAMES COMMAND... -- SSH...` runs beside the supervisor, as
one of its workers. It starts SSH..., which runs `remote.py far` on the host, and writes
to its stdin: one line of JSON with the command, the folder and the variables in NAMES
(their values are on no command line, where others could read them); then a line every
second, which says that somebody still wants the process; "stop" when it is told to end.

The far side runs the command, and kills it and what it has started when stdin ends or
is silent for SILENCE seconds: a host that was cut off must not go on by itself, and
must be free when the job comes back. The exit status travels back through ssh.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

# As in exit_codes.py, which a program that is run by path cannot import; ssh's own.
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
    with contextlib.suppress(BrokenPipeError):  # ssh has ended; it says why
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    while process.poll() is None:
        # Taken one by one: a signal that comes between is not forgotten.
        _beat(process.stdin.fileno(), b"stop\n" if told and told.pop() else b"\n")
        _wait(process, told)
    if process.returncode == SSH_FAILED:
        print(f"meshloom: {host} cannot be reached by {ssh[0]}", file=sys.stderr)
        return UNREACHABLE
    return process.returncode


def _beat(fd: int, word: bytes) -> None:
    """If ssh takes it; one that takes nothing more ends by itself, and says why."""
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(fd, word)


def _wait(process: subprocess.Popen, told: list[int]) -> None:
    """Until the next beat is due, it has ended, or we are told to end."""
    deadline = time.monotonic() + BEAT_SECONDS
    while time.monotonic() < deadline and process.poll() is None and not told:
        time.sleep(0.05)


def far() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    first = sys.stdin.buffer.readline()
    if not first:
        return 0  # nobody is there
    order = json.loads(first)
    try:
        os.chdir(order["folder"])
    except OSError as error:
        print(
            f"meshloom: {os.uname().nodename}: folder {order['folder']}: "
            f"{error.strerror}. It must be there on every host.",
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
    """Until the child has ended, or must."""
    heard = time.monotonic()
    while child.poll() is None:
        if select.select([0], [], [], 0.1)[0]:
            words = os.read(0, 65536)
            if not words:
                return
            heard = time.monotonic()
            if b"stop" in words:
                child.terminate()
        elif time.monotonic() - heard > silence:
            host = os.uname().nodename
            print(
                f"meshloom: {host}: nothing heard for {silence:g} s, ending",
                file=sys.stderr,
            )
            return


def _end(status: int) -> None:
    """Ends as the process did, so that the supervisor sees a signal as a signal."""
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
