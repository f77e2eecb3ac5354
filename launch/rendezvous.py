"""All processes of a job meet at the coordinator's address before jax is told of it.

jax aborts a process that has waited too long for the others, and cannot say for whom.
So process 0 listens there first, by itself: every other process connects, says its
number and host in one line of JSON, and is answered with the hosts of all once all have
come. Then process 0 gives the port to jax. A process that does not come is named.
"""

import contextlib
import errno
import json
import selectors
import socket
import time
from typing import Any

from .exit_codes import Unreachable
from .process_env import COORDINATOR, JOIN_SECONDS, Place, is_loopback, loopback_error

LINE_BYTES = 4096  # of a greeting; whoever sends more is none of us
RETRY_SECONDS = 0.05
SERVICE_SECONDS, SERVICE_RETRY_SECONDS = 10.0, 0.005


def resolve(place: Place) -> str:
    """The address that process 0 shall listen at: the coordinator's, and no other.

    A name may come late to a new pod, so it is looked for as long as a join may take.
    """
    host, port = place.address
    deadline = time.monotonic() + place.join_seconds
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"the coordinator's host {host!r} has no address here "
                    f"({error.strerror}). Set {COORDINATOR} to a name or address that "
                    "every host of the job knows."
                ) from error
            time.sleep(RETRY_SECONDS)
    addresses = [str(answer[4][0]) for answer in found]
    if place.is_on_several_hosts and is_loopback(addresses[0]):
        raise loopback_error(place, addresses[0])
    for address in addresses:
        try:
            with _listener(address, 0):
                return address
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    raise ValueError(
        f"process 0 runs on host {socket.gethostname()!r}, but the coordinator "
        f"{place.coordinator} ({', '.join(addresses)}) is another machine. Start "
        f"process 0 there, or set {COORDINATOR} to this host's name."
    )


def meet(
    place: Place, host: str, bind: str | None = None, *, has_gpus: bool = False
) -> tuple[str, ...]:
    """Returns the host of every process once all are here, or says who is not.

    Args:
      host: the name of this one.
      bind: for process 0, the address to listen at.
      has_gpus: whether this process will use GPUs. One without, whose jax takes the
        CPU instead, would let the others wait for its devices.
    """
    if place.num_processes == 1:
        return (host,)
    if place.process_id == 0:
        assert bind is not None
        return _Reception(place, host, bind, has_gpus).run()
    return _attend(place, host, has_gpus)


def wait_for_service(place: Place) -> None:
    """Returns once process 0's jax listens; for the others, after they have met.

    jax's client, where it is refused once, waits a second before it tries again.
    """
    deadline = time.monotonic() + SERVICE_SECONDS
    while time.monotonic() < deadline:  # after that jax says what is wrong
        with contextlib.suppress(OSError):
            socket.create_connection(place.address, timeout=1).close()
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
    """Process 0, while the others arrive."""

    def __init__(self, place: Place, host: str, bind: str, has_gpus: bool):
        self._place, self._bind, self._has_gpus = place, bind, has_gpus
        self._hosts = {0: host}
        self._numbers: dict[socket.socket, int] = {}  # of those who have come
        self._heard: dict[socket.socket, bytes] = {}  # of those who have not said it
        self._selector = selectors.DefaultSelector()

    def run(self) -> tuple[str, ...]:
        place = self._place
        deadline = time.monotonic() + place.join_seconds
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(self._listen())
            stack.enter_context(self._selector)
            stack.callback(self._close)
            self._selector.register(listener, selectors.EVENT_READ)
            while len(self._hosts) < place.num_processes:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Unreachable(self._missing())
                for key, _ in self._selector.select(left):
                    if key.fileobj is listener:
                        self._welcome(listener.accept()[0])
                    else:
                        self._hear(key.fileobj)  # type: ignore
            hosts = tuple(self._hosts[i] for i in range(place.num_processes))
            listener.close()  # before the answer: the next to connect must find jax
            self._answer({"hosts": hosts})
        return hosts

    def _listen(self) -> socket.socket:
        host, port = self._place.address
        try:
            return _listener(self._bind, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise Unreachable(
                f"port {port} of the coordinator {self._place.coordinator} is taken by "
                f"another program on this host. Set {COORDINATOR} to {host} with "
                "another port."
            ) from error

    def _welcome(self, guest: socket.socket) -> None:
        guest.setblocking(False)
        self._heard[guest] = b""
        self._selector.register(guest, selectors.EVENT_READ)

    def _hear(self, guest: socket.socket) -> None:
        try:
            said = guest.recv(LINE_BYTES)
        except OSError:
            said = b""  # gone
        self._heard[guest] = heard = self._heard[guest] + said
        if not said or len(heard) > LINE_BYTES:
            self._part(guest)
        elif heard.endswith(b"\n") and guest not in self._numbers:
            self._register(guest, heard)

    def _part(self, guest: socket.socket) -> None:
        """Somebody left: a stranger, or a process that may come again."""
        self._selector.unregister(guest)
        self._heard.pop(guest)
        guest.close()
        if guest in self._numbers:
            del self._hosts[self._numbers.pop(guest)]

    def _register(self, guest: socket.socket, line: bytes) -> None:
        try:
            said = json.loads(line)
            number, count, host = said["process"], said["count"], str(said["host"])
            has_gpus = said["gpus"]
        except (ValueError, KeyError, TypeError):
            self._part(guest)  # no process of ours: a port scanner, a browser
            return
        place = self._place
        if count != place.num_processes:
            self._refuse(
                f"process {number} on {host} expects {count} processes in this job, "
                f"process 0 on {self._hosts[0]} expects {place.num_processes}. Start "
                "all processes with the same number, each job with its own port."
            )
        if number in self._hosts:
            self._refuse(
                f"two processes of this job have the number {number}: one on "
                f"{self._hosts[number]}, one on {host}. Give each its own number, and "
                "each job its own port."
            )
        if has_gpus != self._has_gpus:
            names = [f"process {number} on {host}", f"process 0 on {self._hosts[0]}"]
            without, other = names if self._has_gpus else reversed(names)
            self._refuse(
                f"{without} has no GPU that it may use, {other} has. Look at the "
                "driver there (nvidia-smi), or keep all on the CPU."
            )
        self._numbers[guest], self._hosts[number] = number, host

    def _refuse(self, words: str) -> None:
        self._answer({"error": words})
        raise ValueError(words)

    def _answer(self, answer: dict[str, Any]) -> None:
        """Tells all; the others close first, so that the port is free at once."""
        for guest in self._heard:
            guest.setblocking(True)
            guest.settimeout(10)
            with contextlib.suppress(OSError):  # it has left; jax will miss it
                guest.sendall(json.dumps(answer).encode() + b"\n")
                while guest.recv(LINE_BYTES):
                    continue

    def _close(self) -> None:
        for guest in self._heard:
            guest.close()

    def _missing(self) -> str:
        place = self._place
        missing = [i for i in range(place.num_processes) if i not in self._hosts]
        names = ", ".join(place.name(i) for i in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        words = (
            f"waited {place.join_seconds:g} s for all {place.num_processes} processes "
            f"of this job at {place.coordinator}, but {names}{more} did not come. Look "
            f"whether it was started and what it printed, or wait longer with "
            f"{JOIN_SECONDS}."
        )
        if is_loopback(self._bind):
            words += (
                f" {place.coordinator} is {self._bind} here, which can be reached from "
                "this host only."
            )
        self._answer({"error": words, "kind": "unreachable"})
        return words


def _attend(place: Place, host: str, has_gpus: bool) -> tuple[str, ...]:
    """Another process than 0: comes, says who it is, waits for the answer."""
    greeting = {
        "process": place.process_id,
        "host": host,
        "count": place.num_processes,
        "gpus": has_gpus,
    }
    deadline = time.monotonic() + place.join_seconds
    problem = "nobody listens there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(place.address, timeout=left) as line:
                line.sendall(json.dumps(greeting).encode() + b"\n")
                # Process 0 may have begun to wait after us, and names who is missing.
                line.settimeout(left + place.join_seconds)
                text = line.makefile("rb").readline()
        except OSError as error:  # not there yet; what it was is said at the end
            problem = error.strerror or str(error) or type(error).__name__
        else:
            if text:
                return _told(json.loads(text), place)
            problem = "process 0 left while it waited for the others"
        time.sleep(min(RETRY_SECONDS, max(left, 0)))
    raise Unreachable(_unreached(place, host, problem))


def _told(answer: dict[str, Any], place: Place) -> tuple[str, ...]:
    if "error" in answer:
        kind = Unreachable if answer.get("kind") == "unreachable" else ValueError
        raise kind(f"process 0 of this job says: {answer['error']}")
    return tuple(map(str, answer["hosts"]))


def _unreached(place: Place, host: str, problem: str) -> str:
    words = (
        f"process {place.process_id} on {host} tried for {place.join_seconds:g} s to "
        f"reach process 0 at {place.coordinator}: {problem}. Look whether process 0 "
        "was started and what it printed, and whether a firewall is between."
    )
    if is_loopback(place.address[0]):
        words += (
            f" {place.address[0]} can be reached from the host of process 0 only: set "
            f"{COORDINATOR} to a name that other hosts know."
        )
    return words
