"""The faults of a drill of a training between learners.

Each is injected while the training runs, and returns a Mark: where the training stood,
and which learners were hit. It must recover by itself.
"""

import dataclasses
import errno
import os
import random
import signal
import time
from collections.abc import Callable

from ...launch.exit_codes import BAD_INPUT
from ...service.coordinator.settings import Settings
from .drill_job import Failed
from .fleet_job import Fleet, Mark
from .fleet_settings import (
    Setting,
    on_a_small_disk,
    on_a_wire,
    on_etcd,
    on_two_hosts,
    problem,
)

Fault = Callable[[Fleet, random.Random], Mark]
# Longer than a process may be silent before it counts as lost.
PAUSE_SECONDS = Settings().lease_seconds + 4
# Of a file, and of SQLite.
FULL = (os.strerror(errno.ENOSPC), "disk is full")


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
        roles = [_one(fleet, kind, rng) for kind in kinds]
        return fleet.kill(*(_any_process(fleet, role, rng) for role in roles))

    return inject


def kill_all_servers(fleet: Fleet, rng: random.Random) -> Mark:
    del rng
    return fleet.kill(*(f"server {n}" for n in range(fleet.spec.servers)))


def pause(kind: str) -> Fault:
    """Stops a process for longer than its lease, and lets it go on (SIGSTOP, SIGCONT).

    The seconds to recover count from the stop. The process may be killed meanwhile. Of
    a learner it is process 0, which renews the lease.
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


def flip_a_bit(what: str) -> Fault:
    """Flips one bit of a tensor or a message on its way."""

    def inject(fleet: Fleet, rng: random.Random) -> Mark:
        del rng
        wire = fleet.wire
        assert wire is not None
        before = wire.flipped
        wire.flip(what)
        fleet.wait(f"{what} on the wire", lambda: wire.flipped > before)
        return dataclasses.replace(fleet.mark([]), target="the wire")

    return inject


def full_disk(fleet: Fleet, rng: random.Random) -> Mark:
    """Fills the disk of the service, which must stop and say why, and makes room again.

    The seconds to recover count from when the training is continued.
    """
    del rng
    assert fleet.disk is not None
    fleet.disk.fill()
    if (status := fleet.end()) != BAD_INPUT:
        raise Failed(f"the training exited with {status}, not 2; see {fleet.log}")
    text = fleet.log.read_text(errors="replace")
    if not any(name in text for name in FULL):
        raise Failed(f"the training did not say that {FULL[1]}; see {fleet.log}")
    fleet.disk.empty()
    mark = dataclasses.replace(fleet.mark([]), target="the disk")
    fleet.start_again()
    return mark


def kill_leader_and_member(fleet: Fleet, rng: random.Random) -> Mark:
    """Kills the coordinator that leads before a commit, and one member of etcd."""
    assert fleet.etcd is not None
    pid, member = fleet.trap("log"), rng.randrange(len(fleet.etcd.ports))
    fleet.etcd.kill(member)
    mark = fleet.kill(pids=[pid])
    fleet.release()
    return dataclasses.replace(mark, target=f"{mark.target}, etcd {member}")


def pause_leader(fleet: Fleet, rng: random.Random) -> Mark:
    """Stops the coordinator that leads, before a commit, until another one leads.

    When it goes on it writes that commit, which etcd and the servers must refuse.
    """
    del rng
    pid = fleet.trap("log")
    mark = fleet.mark([fleet.role_of(pid)])
    fleet.send(pid, signal.SIGSTOP)
    fleet.release()
    time.sleep(PAUSE_SECONDS)
    fleet.send(pid, signal.SIGCONT)
    return mark


def cut_the_network(fleet: Fleet, rng: random.Random) -> Mark:
    """Cuts off learner 1 for longer than its lease."""
    del rng
    assert fleet.hosts is not None
    mark = fleet.mark(["learner 1"])
    fleet.hosts.cut()
    time.sleep(PAUSE_SECONDS)
    fleet.hosts.restore()
    return mark


def _one(fleet: Fleet, kind: str, rng: random.Random) -> str:
    number = {"learner": fleet.spec.learners, "server": fleet.spec.servers}.get(kind)
    return kind if number is None else f"{kind} {rng.randrange(number)}"


def _any_process(fleet: Fleet, role: str, rng: random.Random) -> str:
    """Returns the role of one of a learner's processes; other roles as they are."""
    processes = fleet.spec.processes
    if processes == 1 or not role.startswith("learner"):
        return role
    return f"{role} process {rng.randrange(processes)}"


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
    "flipped-bit": flip_a_bit("tensor"),
    "flipped-bit-in-pull": flip_a_bit("pulled tensor"),
    "flipped-bit-in-message": flip_a_bit("message"),
    "full-disk": full_disk,
    "leader-before-commit": kill_at("log"),
    "leader-after-commit": kill_at("logged"),
    "pause-leader": pause_leader,
    "leader-and-etcd": kill_leader_and_member,
    "cut-network": cut_the_network,
}
# What a training needs around it for a fault; the others need nothing.
SETTINGS: dict[str, Setting] = {
    "flipped-bit": on_a_wire,
    "flipped-bit-in-pull": on_a_wire,
    "flipped-bit-in-message": on_a_wire,
    "full-disk": on_a_small_disk,
    **dict.fromkeys(
        ("leader-before-commit", "leader-after-commit", "pause-leader"), on_etcd
    ),
    "leader-and-etcd": on_etcd,
    "cut-network": on_two_hosts,
}
# Of a soak: one of them at a time, at random.
KILLS = ("learner", "server", "coordinator")


def impossible() -> dict[str, str]:
    """Returns the faults that cannot be injected here, and why."""
    found = {name: problem(setting) for name, setting in SETTINGS.items()}
    return {name: why for name, why in found.items() if why}
