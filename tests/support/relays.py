"""TCP relays between a client and a server that count every byte."""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Listens at `address`, and passes everything on to another one.

    Attributes:
      up, down: bytes from and to the clients so far, with all framing of gRPC.
    """

    def __init__(self, target: str):
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.up = self.down = 0
        self._is_closing = False
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._is_closing = True
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _listen(self) -> None:
        while not self._is_closing:
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, _ = self._listener.accept()
            thread = threading.Thread(target=self._relay, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _relay(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            with socket.create_connection(self._target) as server:
                while not self._is_closing:
                    for source in select.select([client, server], [], [], 0.05)[0]:
                        data = source.recv(1 << 20)
                        if not data:
                            return
                        if source is client:
                            self.up += len(data)
                            server.sendall(data)
                        else:
                            self.down += len(data)
                            client.sendall(data)


@contextlib.contextmanager
def relays(*targets: str) -> Iterator[list[Relay]]:
    made = [Relay(target) for target in targets]
    try:
        yield made
    finally:
        for relay in made:
            relay.close()
