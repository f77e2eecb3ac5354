"""Three small programs that leave no orphans, however the supervisor ends.

`guard.py worker PARENT COMMAND...` asks the kernel to kill this process when PARENT,
which started it, dies (Linux only), and execs COMMAND.

`guard.py heir` reads "+GROUP" and "-GROUP" from stdin, one per line, and kills the
remaining process groups when stdin closes: the children of workers, which the kernel
does not cover, and on other systems the workers themselves.

`guard.py rank LOGS COMMAND...` is what mpirun and srun start as each process of a job:
it dies with whatever started it, finds its index, redirects its output to its own log
in the folder LOGS, sets where to report progress, and execs COMMAND.

All are run by path with `python -I -S`: they start fast, and nothing that the user has
installed can break them.
"""

import contextlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
# The variables in which Open MPI, MPICH and Slurm give the index of a process.
NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def worker(parent: int, command: list[str]) -> None:
    die_with(parent)
    os.execvp(command[0], command)


def rank(folder: str, command: list[str]) -> None:
    _die_with_parent()
    number = next((os.environ[name] for name in NUMBERS if name in os.environ), None)
    if number is None:
        sys.exit(f"meshloom: no process index: none of {', '.join(NUMBERS)} is set")
    os.makedirs(folder, exist_ok=True)
    log = os.path.join(folder, f"worker-{number}.log")
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    os.environ["MESHLOOM_PROGRESS"] = os.path.join(folder, f"progress-{number}.json")
    os.execvp(command[0], command)


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies."""
    _die_with_parent()
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
            sys.exit(f"guard: prctl: {os.strerror(ctypes.get_errno())}")


def heir() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        # Already gone; macOS reports that as EPERM.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "rank":
        rank(sys.argv[2], sys.argv[3:])
    else:
        heir()
