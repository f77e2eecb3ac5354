"""Two small programs that leave no orphan, however the supervisor ends.

`guard.py worker PARENT COMMAND...` asks the kernel to kill this process together with
PARENT, which started it, and becomes COMMAND. Only Linux has that.

`guard.py heir` reads "+GROUP" and "-GROUP" from stdin, a line each, and kills the
process groups that are left when stdin ends: the children of workers, which the
kernel's promise does not reach, and on other systems the workers.

Both are run by path with `python -I -S`: they start at once, and nothing that the user
has installed can break them.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def worker(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
            sys.exit(f"guard: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(command[0], command)


def heir() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # gone by itself; macOS says so with EPERM


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(int(sys.argv[2]), sys.argv[3:])
    else:
        heir()
