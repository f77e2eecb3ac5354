"""A coordinator and servers in threads of this process, over real sockets."""

import json
import threading
import time
from importlib import metadata

import numpy as np

from meshloom.service.coordinator.coordinator import Coordinator
from meshloom.service.coordinator.servers import RemoteServer
from meshloom.service.coordinator.settings import Settings
from meshloom.service.server.server import ServerProcess
from meshloom.service.wire.calls import Channel, Server

LIMIT = 60.0
LEASE = 8.0


class World:
    """A coordinator and servers, in threads."""

    def __init__(self, folder, num_servers: int):
        self.folder, self.said = folder, []
        self.servers: dict[str, ServerProcess] = {}
        self.num_servers = num_servers
        self._is_over = threading.Event()
        self.coordinate()
        for index in range(num_servers):
            self.add(f"s{index}")

    def coordinate(self, port: int = 0) -> None:
        self.coordinator = Coordinator(
            self.folder,
            num_servers=self.num_servers,
            version=metadata.version("meshloom"),
            settings=Settings(lease_seconds=LEASE, failover_seconds=4.0, save_every=4),
            connect=lambda n, a: RemoteServer(n, a, Channel(a)),
            clock=time.monotonic,
            say=self.say,
        )
        self.port = Server(f"127.0.0.1:{port}", self.coordinator.methods)
        self.address = f"127.0.0.1:{self.port.port}"
        self._watching = threading.Thread(target=self._watch, args=(self.coordinator,))
        self._watching.start()

    def say(self, text: str, event: str = "note", **fields) -> None:
        self.said.append(text)

    def _watch(self, coordinator) -> None:
        while coordinator is self.coordinator and not self._is_over.wait(0.05):
            coordinator.watch()

    def restart(self, meanwhile) -> None:
        """Replaces the coordinator by one with the same port and folder."""
        old, port = self.coordinator, self.port
        self.coordinator = None
        self._watching.join()
        self.port.close(0)
        old.close()
        meanwhile()
        self.coordinate(port.port)

    def add(self, name: str) -> None:
        self.servers[name] = ServerProcess(name=name, coordinator=self.address)

    def kill(self, name: str) -> None:
        process = self.servers.pop(name)
        process._is_closing.set()  # it beats no more
        process._server.close(0)

    @property
    def job(self):
        return self.coordinator._drivers["run"].job

    def until(self, is_so) -> None:
        deadline = time.monotonic() + LIMIT
        while not is_so():
            assert self.coordinator.failure is None, self.coordinator.failure
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def end(self) -> tuple[dict, list]:
        """Returns the final digests, and the norms of all updates."""
        final = self.folder / "run" / "final.json"
        self.until(final.exists)
        norms = [np.float32(row["norm"]) for row in self.rows()]
        return json.loads(final.read_text())["digests"], norms

    def rows(self) -> list[dict]:
        text = (self.folder / "run" / "commits.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def close(self) -> None:
        self._is_over.set()
        self._watching.join()
        for process in self.servers.values():
            process._is_closing.set()
        self.port.close(0)
        self.coordinator.close()
        for process in self.servers.values():
            process.close()
