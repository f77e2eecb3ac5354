"""A process with everything imported, from which the workers of a job are forked.

`python -m meshloom.trainer.warm COMMAND...` is started once by the supervisor of a job
on this machine (launch/warm.py). For each worker it reads a line of JSON from stdin,

    {"env": {"NAME": "VALUE", ...}, "log": "FILE", "parent": PID}

forks a process that runs `meshloom COMMAND...` in that environment, and prints its
process id. It has initialized no device and started no Python thread, so a fork is as
good as a new process, and is ready a second or two earlier.
"""

import gc
import importlib
import json
import os
import sys
import threading
import time
from typing import Any

from ..launch import guard
from . import cli
from .commands.devices import without_collection

# What `meshloom train` imports before its first step, with any shipped config.
MODULES = (
    "meshloom.models.transformer",
    "meshloom.trainer.job.joining",
    "meshloom.trainer.job.preemption",
    "meshloom.trainer.plan.choosing",
    "meshloom.trainer.run.train",
    "grain",
    "jax.experimental.multihost_utils",
)
# How long a worker waits until the supervisor has become its parent.
ADOPTED_SECONDS = 10.0


def main(command: list[str]) -> int:
    """Forks workers until stdin ends; in each worker, runs the command."""
    with without_collection():
        for name in MODULES:
            importlib.import_module(name)
    if threading.active_count() > 1:  # locks they hold would stay locked in a fork
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise RuntimeError(f"imports have started threads ({names}); use launch --cold")
    gc.collect()
    gc.freeze()  # so that a worker's garbage collection does not copy shared pages
    for line in sys.stdin:
        pid = _fork(json.loads(line))
        if pid is None:
            return cli.main(command)
        os.write(sys.stdout.fileno(), f"{pid}\n".encode())
    return 0


def _fork(request: dict[str, Any]) -> int | None:
    """Returns the process id of the new worker; None in the worker itself.

    The worker is a grandchild whose parent exits at once, so it becomes a child of the
    supervisor, which is a subreaper.
    """
    reader, writer = os.pipe()
    parent = os.fork()
    if parent:
        os.close(writer)
        os.waitpid(parent, 0)
        with open(reader, "rb") as answer:
            return int(answer.read())
    os.close(reader)
    if pid := os.fork():
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(writer)
    os.setsid()
    _become(request)
    return None


def _become(request: dict[str, Any]) -> None:
    """Gives this process the output, the parent and the environment of a worker."""
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for output in (1, 2):
        os.dup2(log, output)
    deadline = time.monotonic() + ADOPTED_SECONDS
    while os.getppid() != request["parent"] and time.monotonic() < deadline:
        time.sleep(0.001)
    guard.die_with(request["parent"])
    os.environ.clear()
    os.environ.update(request["env"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
