"""Calls of etcd's JSON gateway: one of several members answers, within a deadline.

Every call may be repeated at another member, also when the first one may have done it.
"""

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from .etcd_url import EtcdUrl
from .store import StoreUnavailable

# The first round asks each member for so long, the next one twice as long, and so on.
ATTEMPT_SECONDS = 1.0
PAUSE_SECONDS = 0.05  # after a round in which no member answered
# Codes of gRPC.
UNKNOWN, DEADLINE, EXHAUSTED, OUT_OF_RANGE, UNAVAILABLE = 2, 4, 8, 11, 14
UNAUTHENTICATED = 16
PASSING = {UNKNOWN, DEADLINE, UNAVAILABLE}  # another member may do better

Endpoint = tuple[str, int]
Body = dict[str, Any]


class EtcdRefused(ValueError):
    """etcd said no; `code` is that of gRPC."""

    def __init__(self, where: str, path: str, answer: Body):
        self.code = int(answer.get("code", answer.get("grpc_code", UNKNOWN)))
        text = answer.get("message") or answer.get("error") or "no reason given"
        if self.code == EXHAUSTED:
            text += ". Give it more space (--quota-backend-bytes), compact and "
            text += "defragment it, and disarm its alarm"
        if "user name is empty" in text:
            text += ". Name a file with NAME:PASSWORD: --store 'etcd://...?user=FILE'"
        super().__init__(f"etcd at {where} refused {path}: {text}")


class Gateway:
    """The members of one cluster. Threads may share it."""

    def __init__(self, url: EtcdUrl):
        self._endpoints, self._tls = url.endpoints, url.tls()
        self._credentials = url.credentials()
        self._token: str | None = None
        self._lock = threading.Lock()  # guards what follows
        self._current = 0  # the member that answered last
        self._idle: dict[Endpoint, list[http.client.HTTPConnection]] = {}
        self._is_closed = False

    def call(self, path: str, body: Body, seconds: float) -> Body:
        """Returns the answer of any member; raises StoreUnavailable if none came."""
        deadline, tried, why = time.monotonic() + seconds, 0, "no time"
        data = json.dumps(body).encode()
        while (left := deadline - time.monotonic()) > 0 and not self._is_closed:
            rounds, place = divmod(tried, len(self._endpoints))
            if tried and place == 0:
                time.sleep(min(PAUSE_SECONDS, left))
            tried += 1
            endpoint = self._endpoints[self._current]
            limit = min(left, ATTEMPT_SECONDS * 2 ** min(rounds, 10))
            try:
                return self._once(endpoint, path, data, limit)
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                why = f"{endpoint[0]}:{endpoint[1]}: {error or type(error).__name__}"
            except EtcdRefused as error:
                if error.code not in PASSING:
                    raise
                why = str(error)
            self._move_on(endpoint)
        raise StoreUnavailable(
            f"etcd gave no answer to {path} in {seconds:g} s ({why})"
        )

    def stream(self, path: str, body: Body, seconds: float) -> Iterator[Body]:
        """Yields what one member sends, until so many seconds have passed."""
        endpoint, deadline = self._endpoints[self._current], time.monotonic() + seconds
        connection = self._connect(endpoint, min(seconds, ATTEMPT_SECONDS))
        try:
            headers = self._headers(endpoint, ATTEMPT_SECONDS)
            connection.request("POST", path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            while (left := deadline - time.monotonic()) > 0:
                if connection.sock is not None:
                    connection.sock.settimeout(left)
                try:
                    line = response.readline()
                except TimeoutError:
                    return
                if not line:
                    raise http.client.HTTPException("the stream ended")
                yield _answer(endpoint, path, line)
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            self._move_on(endpoint)
            raise StoreUnavailable(
                f"etcd at {endpoint[0]}:{endpoint[1]}: {path}: {error!r}"
            ) from error
        finally:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            connections = [c for group in self._idle.values() for c in group]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _once(self, endpoint: Endpoint, path: str, data: bytes, seconds: float) -> Body:
        for is_again in (False, True):
            headers = self._headers(endpoint, seconds)
            try:
                return self._post(endpoint, path, data, headers, seconds)
            except EtcdRefused as error:
                if error.code != UNAUTHENTICATED or is_again or not self._credentials:
                    raise
                self._token = None  # it has run out
        raise AssertionError("unreachable")

    def _headers(self, endpoint: Endpoint, seconds: float) -> dict[str, str]:
        """Returns the headers of a call, with a token if there is a password."""
        if self._credentials is None:
            return {}
        if (token := self._token) is None:
            name, password = self._credentials
            data = json.dumps({"name": name, "password": password}).encode()
            answer = self._post(endpoint, "/v3/auth/authenticate", data, {}, seconds)
            token = self._token = str(answer["token"])
        return {"Authorization": token}

    def _post(
        self,
        endpoint: Endpoint,
        path: str,
        data: bytes,
        headers: dict[str, str],
        seconds: float,
    ) -> Body:
        with self._lock:
            idle = self._idle.setdefault(endpoint, [])
            connection = idle.pop() if idle else None
        connection = connection or self._connect(endpoint, seconds)
        try:
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            connection.request("POST", path, data, headers)
            answer = connection.getresponse().read()
        except BaseException:
            connection.close()
            raise
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.setdefault(endpoint, []).append(connection)
        if not is_kept:
            connection.close()
        # A call that could be a stream answers with one object a line.
        return _answer(endpoint, path, answer.partition(b"\n")[0])

    def _connect(
        self, endpoint: Endpoint, seconds: float
    ) -> http.client.HTTPConnection:
        host, port = endpoint
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=seconds)
        return http.client.HTTPSConnection(
            host, port, timeout=seconds, context=self._tls
        )

    def _move_on(self, endpoint: Endpoint) -> None:
        """Asks another member from now on."""
        with self._lock:
            idle = self._idle.pop(endpoint, [])
            if self._endpoints[self._current] == endpoint:
                self._current = (self._current + 1) % len(self._endpoints)
        for connection in idle:
            connection.close()


def _answer(endpoint: Endpoint, path: str, data: bytes) -> Body:
    answer = json.loads(data)
    error = answer.get("error")
    if error is not None:
        found = error if isinstance(error, dict) else answer
        raise EtcdRefused(f"{endpoint[0]}:{endpoint[1]}", path, found)
    return answer


def encoded(text: str) -> str:
    """Returns text as the gateway takes bytes."""
    return base64.b64encode(text.encode()).decode()


def decoded(text: str) -> str:
    return base64.b64decode(text).decode()
