"""A wire between the processes of a training on which a drill can flip a bit.

All calls of the service go through an HTTP proxy of the drill, which gRPC finds in the
variable `grpc_proxy`. It passes bytes on as they are, until it is told to flip one.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

# By what passes at once: how many bytes it has, and which of them gets the flipped bit.
# Calls end with their message, after headers; tensors are longer.
TENSOR_BYTES = 4096
BYTES = {
    "tensor": (TENSOR_BYTES, 1 / 2),
    "pulled tensor": (TENSOR_BYTES, 1 / 2),
    "message": (300, 7 / 8),
}
CHUNK_BYTES, POLL_SECONDS = 1 << 16, 0.1
ANSWER = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Wire:
    """An HTTP proxy on loopback that answers CONNECT.

    Attributes:
      flipped: how many bits were flipped.
    """

    flipped = 0

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_closing = False
        self._lock = threading.Lock()
        self._asked: list[str] = []
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        self._threads[0].start()

    @property
    def variables(self) -> dict[str, str]:
        """Variables with which a process calls others through this proxy."""
        port = self._listener.getsockname()[1]
        return {"grpc_proxy": f"http://127.0.0.1:{port}"}

    def flip(self, what: str) -> None:
        """Flips one bit of the next one of BYTES that passes."""
        with self._lock:
            self._asked.append(what)

    def close(self) -> None:
        self._is_closing = True
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _listen(self) -> None:
        while not self._is_closing:
            if not select.select([self._listener], [], [], POLL_SECONDS)[0]:
                continue
            client, _ = self._listener.accept()
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            request = b""
            while not request.endswith(b"\r\n\r\n"):
                part = client.recv(CHUNK_BYTES)
                if not part:
                    return
                request += part
            host, _, port = request.split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port))) as server:
                client.sendall(ANSWER)
                self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        while not self._is_closing:
            for source in select.select([client, server], [], [], POLL_SECONDS)[0]:
                data = source.recv(CHUNK_BYTES)
                if not data:
                    return
                is_call = source is client
                target = server if is_call else client
                target.sendall(self._with_flip(data, is_call))

    def _with_flip(self, data: bytes, is_call: bool) -> bytes:
        found = "message" if is_call else ""
        if len(data) >= TENSOR_BYTES:
            found = "tensor" if is_call else "pulled tensor"
        with self._lock:
            what = self._asked[0] if self._asked else ""
            if not what or found != what or len(data) < BYTES[what][0]:
                return data
            share = BYTES[what][1]
            del self._asked[0]
            self.flipped += 1
        damaged = bytearray(data)
        damaged[int(share * len(data))] ^= 1
        return bytes(damaged)


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    """A wire that is closed at the end of the block."""
    made = Wire()
    try:
        yield made
    finally:
        made.close()
