"""The rendezvous of a job's processes at the coordinator's address, ahead of jax's.

jax aborts a process that has waited too long for the others, and cannot say for which.
So process 0 first listens there itself. Every other process connects and sends its
index and host as one line of JSON; once all have joined, each gets the list of hosts.
Then process 0 hands the port to jax. A process that does not join is named.
"""

import contextlib
import errno
import json
import selectors
import socket
import time
from typing import Any

from .exit_codes import Unreachable
from .process_env import (
    COORDINATOR,
    JOIN_SECONDS,
    ProcessEnv,
    is_loopback,
    loopback_error,
)

LINE_BYTES = 4096  # longest greeting; anything longer is not from us
RETRY_SECONDS = 0.05
SERVICE_SECONDS, SERVICE_RETRY_SECONDS = 10.0, 0.005


def resolve(env: ProcessEnv) -> str:
    """Returns the address for process 0 to listen on: the coordinator's, and no other.

    The name of a new pod may take a while to resolve, so this retries for as long as
    joining may take.
    """
    host, port = env.address
    deadline = time.monotonic() + env.join_seconds
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"the coordinator's host {host!r} has no address here "
                    f"({error.strerror}). Set {COORDINATOR} to a name or address that "
                    "every host of the job can resolve."
                ) from error
            time.sleep(RETRY_SECONDS)
    addresses = [str(answer[4][0]) for answer in found]
    if env.is_on_several_hosts and is_loopback(addresses[0]):
        raise loopback_error(env, addresses[0])
    for address in addresses:
        try:
            with _listener(address, 0):
                return address
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    raise ValueError(
        f"process 0 runs on host {socket.gethostname()!r}, but the coordinator "
        f"{env.coordinator} ({', '.join(addresses)}) is another machine. Start "
        f"process 0 there, or set {COORDINATOR} to this host's name."
    )


def meet(
    env: ProcessEnv, host: str, bind: str | None = None, *, has_gpus: bool = False
) -> tuple[str, ...]:
    """Waits for every process and returns their hosts, or raises with who is missing.

    Args:
      host: the name of this host.
      bind: for process 0, the address to listen on.
      has_gpus: whether this process will use GPUs. If one has none and jax falls back
        to the CPU there, the others would wait for its devices.
    """
    if env.num_processes == 1:
        return (host,)
    if env.process_id == 0:
        assert bind is not None
        return _Reception(env, host, bind, has_gpus).run()
    return _attend(env, host, has_gpus)


def wait_for_service(env: ProcessEnv) -> None:
    """Waits until jax listens in process 0; the others call this after `meet`.

    jax's client waits a second after a refused connection before it tries again.
    """
    deadline = time.monotonic() + SERVICE_SECONDS
    while time.monotonic() < deadline:  # after that jax reports what is wrong
        with contextlib.suppress(OSError):
            socket.create_connection(env.address, timeout=1).close()
            return
        time.sleep(SERVICE_RETRY_SECONDS)


def _listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class _Reception:
    """Process 0's side: accepts the others until all have joined."""

    def __init__(self, env: ProcessEnv, host: str, bind: str, has_gpus: bool):
        self._env, self._bind, self._has_gpus = env, bind, has_gpus
        self._hosts = {0: host}
        self._numbers: dict[socket.socket, int] = {}  # of those that have joined
        self._heard: dict[socket.socket, bytes] = {}  # received so far
        self._selector = selectors.DefaultSelector()

    def run(self) -> tuple[str, ...]:
        env = self._env
        deadline = time.monotonic() + env.join_seconds
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(self._listen())
            stack.enter_context(self._selector)
            stack.callback(self._close)
            self._selector.register(listener, selectors.EVENT_READ)
            while len(self._hosts) < env.num_processes:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Unreachable(self._missing())
                for key, _ in self._selector.select(left):
                    if key.fileobj is listener:
                        self._welcome(listener.accept()[0])
                    else:
                        self._hear(key.fileobj)  # type: ignore
            hosts = tuple(self._hosts[i] for i in range(env.num_processes))
            listener.close()  # before the reply: whoever connects next must find jax
            self._answer({"hosts": hosts})
        return hosts

    def _listen(self) -> socket.socket:
        host, port = self._env.address
        try:
            return _listener(self._bind, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise Unreachable(
                f"port {port} of the coordinator {self._env.coordinator} is in use "
                f"by another program on this host. Set {COORDINATOR} to {host} with "
                "another port."
            ) from error

    def _welcome(self, guest: socket.socket) -> None:
        guest.setblocking(False)
        self._heard[guest] = b""
        self._selector.register(guest, selectors.EVENT_READ)

    def _hear(self, guest: socket.socket) -> None:
        try:
            received = guest.recv(LINE_BYTES)
        except OSError:
            received = b""  # gone
        self._heard[guest] = heard = self._heard[guest] + received
        if not received or len(heard) > LINE_BYTES:
            self._part(guest)
        elif heard.endswith(b"\n") and guest not in self._numbers:
            self._register(guest, heard)

    def _part(self, guest: socket.socket) -> None:
        """Drops a connection: a stranger's, or a process that may connect again."""
        self._selector.unregister(guest)
        self._heard.pop(guest)
        guest.close()
        if guest in self._numbers:
            del self._hosts[self._numbers.pop(guest)]

    def _register(self, guest: socket.socket, line: bytes) -> None:
        try:
            received = json.loads(line)
            number, count, host = (
                received["process"],
                received["count"],
                str(received["host"]),
            )
            has_gpus = received["gpus"]
        except (ValueError, KeyError, TypeError):
            self._part(guest)  # not one of our processes: a port scanner, a browser
            return
        env = self._env
        if count != env.num_processes:
            self._refuse(
                f"process {number} on {host} expects {count} processes in this job, "
                f"process 0 on {self._hosts[0]} expects {env.num_processes}. Start "
                "all processes with the same count, and each job on its own port."
            )
        if number in self._hosts:
            self._refuse(
                f"two processes of this job have index {number}: one on "
                f"{self._hosts[number]}, one on {host}. Give each process its own "
                "index, and each job its own port."
            )
        if has_gpus != self._has_gpus:
            names = [f"process {number} on {host}", f"process 0 on {self._hosts[0]}"]
            without, other = names if self._has_gpus else reversed(names)
            self._refuse(
                f"{without} has no usable GPU, but {other} has. Check the driver there "
                "(nvidia-smi), or run all processes on the CPU."
            )
        self._numbers[guest], self._hosts[number] = number, host

    def _refuse(self, message: str) -> None:
        self._answer({"error": message})
        raise ValueError(message)

    def _answer(self, answer: dict[str, Any]) -> None:
        """Replies to all; the others close first, so that the port is free at once."""
        for guest in self._heard:
            guest.setblocking(True)
            guest.settimeout(10)
            with contextlib.suppress(OSError):  # it is gone; jax will notice
                guest.sendall(json.dumps(answer).encode() + b"\n")
                while guest.recv(LINE_BYTES):
                    continue

    def _close(self) -> None:
        for guest in self._heard:
            guest.close()

    def _missing(self) -> str:
        env = self._env
        missing = [i for i in range(env.num_processes) if i not in self._hosts]
        names = ", ".join(env.name(i) for i in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        message = (
            f"waited {env.join_seconds:g} s for all {env.num_processes} processes "
            f"of this job at {env.coordinator}, but {names}{more} did not join. "
            "Check whether it was started and what it printed, or wait longer with "
            f"{JOIN_SECONDS}."
        )
        if is_loopback(self._bind):
            message += (
                f" {env.coordinator} is {self._bind} here, which only this host can "
                "reach."
            )
        self._answer({"error": message, "kind": "unreachable"})
        return message


def _attend(env: ProcessEnv, host: str, has_gpus: bool) -> tuple[str, ...]:
    """Any other process's side: connects, sends its index, waits for the reply."""
    greeting = {
        "process": env.process_id,
        "host": host,
        "count": env.num_processes,
        "gpus": has_gpus,
    }
    deadline = time.monotonic() + env.join_seconds
    problem = "nothing is listening there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(env.address, timeout=left) as line:
                line.sendall(json.dumps(greeting).encode() + b"\n")
                # Process 0 may have started to wait after us, and names who is missing.
                line.settimeout(left + env.join_seconds)
                text = line.makefile("rb").readline()
        except OSError as error:  # not there yet; reported at the deadline
            problem = error.strerror or str(error) or type(error).__name__
        else:
            if text:
                return _told(json.loads(text), env)
            problem = "process 0 exited while waiting for the others"
        time.sleep(min(RETRY_SECONDS, max(left, 0)))
    raise Unreachable(_unreached(env, host, problem))


def _told(answer: dict[str, Any], env: ProcessEnv) -> tuple[str, ...]:
    if "error" in answer:
        kind = Unreachable if answer.get("kind") == "unreachable" else ValueError
        raise kind(f"process 0 of this job says: {answer['error']}")
    return tuple(map(str, answer["hosts"]))


def _unreached(env: ProcessEnv, host: str, problem: str) -> str:
    message = (
        f"process {env.process_id} on {host} tried for {env.join_seconds:g} s to "
        f"reach process 0 at {env.coordinator}: {problem}. Check whether process "
        "0 was started, what it printed, and whether a firewall is in between."
    )
    if is_loopback(env.address[0]):
        message += (
            f" {env.address[0]} can only be reached from process 0's own host: set "
            f"{COORDINATOR} to a name that other hosts can resolve."
        )
    return message
