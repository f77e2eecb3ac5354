"""A real Slurm of two nodes, each on a host of its own; see two_hosts.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from two_hosts import Host


@contextlib.contextmanager
def slurm_cluster(a: Host, b: Host) -> Iterator[dict[str, str]]:
    """Starts the daemons; gives the variables that Slurm's commands need on host a.

    They end with the namespaces they run in.
    """
    # A short name: Slurm puts sockets there, whose paths have 108 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    conf = folder / "slurm.conf"
    conf.write_text(_conf((a, b), folder))
    munge = _munge(folder)
    env = {"SLURM_CONF": str(conf)}
    try:
        a.start(["slurmctld", "-D", "-f", str(conf)], folder / "slurmctld.out", env)
        for host in (a, b):
            argv = ["slurmd", "-D", "-N", host.name, "-f", str(conf)]
            host.start(argv, folder / f"slurmd-{host.name}.out", env)
        deadline, found = time.monotonic() + 60, None
        while found is None or found.stdout.split() != ["idle"] * 2:
            assert time.monotonic() < deadline, f"{found}\n{_logs(folder)}"
            time.sleep(0.5)
            argv = ["sinfo", "-h", "-N", "-o", "%t"]
            found = a.run(argv, 30, env={**os.environ, **env})
        yield env
    finally:
        munge.kill()
        munge.wait()
        for host in (a, b):  # they write into the folder
            host.end()
        shutil.rmtree(folder)


def _conf(hosts: tuple[Host, Host], folder: Path) -> str:
    settings = {
        "ClusterName": "loom",
        "SlurmctldHost": f"{hosts[0].name}({hosts[0].address})",
        "SlurmctldPort": 17000,
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge.socket",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "KillWait": 30,
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd-%n.log",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    for host in hosts:
        lines.append(
            f"NodeName={host.name} NodeHostname={host.name} NodeAddr={host.address} "
            "Port=17001 CPUs=1 RealMemory=1000"
        )
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def _munge(folder: Path) -> subprocess.Popen:
    """A daemon of its own, as root, with a key of its own."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    folder.chmod(0o755)
    argv = [
        *("munged", "--foreground", "--force", f"--key-file={key}"),
        *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"),
        *(f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"),
    ]
    with open(folder / "munge.out", "wb") as output:
        return subprocess.Popen(
            argv, stdout=output, stderr=output, start_new_session=True
        )


def _logs(folder: Path) -> str:
    files = sorted([*folder.glob("*.log"), *folder.glob("*.out")])
    return "\n".join(f"== {f.name}\n{f.read_text()[-1500:]}" for f in files)
