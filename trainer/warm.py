"""A process that has imported everything, from which the workers of a job are forked.

`python -m meshloom.trainer.warm COMMAND...` is started once by the supervisor of a job
on this machine (launch/warm.py). It reads a line of JSON from stdin for each worker,

    {"env": {"NAME": "VALUE", ...}, "log": "FILE", "parent": PID}

forks one that runs `meshloom COMMAND...` in that environment, and answers with its
process number. It has no device and no thread of Python's, so a fork of it is as good
as a new process, and is there a second or two earlier.
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

# What `meshloom train` imports before its first step, on any config of ours.
MODULES = (
    "meshloom.models.transformer",
    "meshloom.trainer.job.joining",
    "meshloom.trainer.job.preemption",
    "meshloom.trainer.plan.choosing",
    "meshloom.trainer.run.train",
    "grain",
    "jax.experimental.multihost_utils",
)
ADOPTED_SECONDS = 10.0


def main(command: list[str]) -> int:
    """Serves until stdin ends; in each worker, runs the command."""
    for name in MODULES:
        importlib.import_module(name)
    if threading.active_count() > 1:  # their locks would stay locked in a fork
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise RuntimeError(f"imports have started threads ({names}); use launch --cold")
    gc.collect()
    gc.freeze()  # a worker's collections then leave the pages alone that all share
    for line in sys.stdin:
        pid = _fork(json.loads(line))
        if pid is None:
            return cli.main(command)
        os.write(sys.stdout.fileno(), f"{pid}\n".encode())
    return 0


def _fork(request: dict[str, Any]) -> int | None:
    """Returns the number of the new worker; None in the worker itself.

    The worker is a grandchild whose parent ends at once, and so becomes a child of the
    supervisor, which has asked the kernel for orphans.
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
    """Makes this process a worker: its output, its parent and its environment."""
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
