"""The faults of a drill of a training between learners.

Each is injected while the training runs, and returns a Mark: where the training stood,
and which learners were hit. It must recover by itself.
"""

import random
import signal
import time
from collections.abc import Callable

from ...service.coordinator.settings import Settings
from .fleet_job import Fleet, Mark

Fault = Callable[[Fleet, random.Random], Mark]
# Longer than a process may be silent before it counts as lost.
PAUSE_SECONDS = Settings().lease_seconds + 4


def kill_at(point: str) -> Fault:
    """Kills the process that reaches a point next."""

    def inject(fleet: Fleet, rng: random.Random) -> Mark:
        del rng
        mark = fleet.kill(pids=[fleet.trap(point)])
        fleet.release()
        return mark

    return inject


def kill(*kinds: str) -> Fault:
    """Kills one process of each kind at once, at any time."""

    def inject(fleet: Fleet, rng: random.Random) -> Mark:
        return fleet.kill(*(_one(fleet, kind, rng) for kind in kinds))

    return inject


def kill_all_servers(fleet: Fleet, rng: random.Random) -> Mark:
    del rng
    return fleet.kill(*(f"server {n}" for n in range(fleet.spec.servers)))


def pause(kind: str) -> Fault:
    """Stops a process for longer than its lease, and lets it go on (SIGSTOP, SIGCONT).

    The seconds to recover count from the stop. The process may be killed meanwhile.
    """

    def inject(fleet: Fleet, rng: random.Random) -> Mark:
        role = _one(fleet, kind, rng)
        pid = fleet.pid_of(role)
        mark = fleet.mark([role])
        fleet.send(pid, signal.SIGSTOP)
        time.sleep(PAUSE_SECONDS)
        if fleet.pid_of(role) == pid:  # otherwise it was replaced
            fleet.send(pid, signal.SIGCONT)
        return mark

    return inject


def _one(fleet: Fleet, kind: str, rng: random.Random) -> str:
    number = {"learner": fleet.spec.learners, "server": fleet.spec.servers}.get(kind)
    return kind if number is None else f"{kind} {rng.randrange(number)}"


# All faults, in the order in which `meshloom drill --learners N` injects them.
FAULTS: dict[str, Fault] = {
    "learner": kill("learner"),
    "learner-computing": kill_at("compute"),
    "learner-pushing": kill_at("push"),
    "server": kill("server"),
    "server-applying": kill_at("apply"),
    "servers": kill_all_servers,
    "coordinator": kill("coordinator"),
    "coordinator-before-commit": kill_at("log"),
    "coordinator-after-commit": kill_at("logged"),
    "coordinator-and-server": kill("coordinator", "server"),
    "pause-learner": pause("learner"),
    "pause-server": pause("server"),
    "pause-coordinator": pause("coordinator"),
}
# Of a soak: one of them at a time, at random.
KILLS = ("learner", "server", "coordinator")
