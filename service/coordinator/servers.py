"""The servers of a job, called all at once; every call may be repeated safely."""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..blocks import hashing
from ..blocks.digest import add, digest_of
from ..blocks.layout import Layout
from ..blocks.tables import Table
from ..wire.errors import Unavailable

# A call that merges, updates or saves all blocks of a server. Beats tell much sooner
# that a server is dead; this is for one that lives and does not answer.
CALL_SECONDS = 300.0
RETRY_SECONDS = 0.2


class ServerLost(Exception):
    """A server is gone, or has lost what it held; the message names it."""

    def __init__(self, name: str, why: str):
        super().__init__(f"server {name} is lost: {why}")
        self.name = name


class Server(Protocol):
    """A server as the coordinator sees it; tests use one without a network."""

    name: str
    address: str

    def call(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer; raises Refused, or ServerLost if there is none."""
        ...


class RemoteServer:
    """A server that is called over the network.

    Args:
      channel: a wire Channel to it.
    """

    def __init__(self, name: str, address: str, channel: Any):
        self.name = name
        self.address = address
        self._channel = channel
        self._lost = threading.Event()

    def mark_lost(self) -> None:
        """Ends calls under way and their retries: its lease has expired."""
        self._lost.set()
        self._channel.close()

    def call(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            left = deadline - time.monotonic()
            if self._lost.is_set():
                raise ServerLost(self.name, f"{method} was not called")
            try:
                return self._channel.call(method, message, max(left, RETRY_SECONDS))
            except Unavailable as error:
                if self._lost.is_set() or time.monotonic() > deadline:
                    raise ServerLost(self.name, f"{method}: {error}") from error
            self._lost.wait(RETRY_SECONDS)


class ServerGroup:
    """The servers of one job, and which of them has which block."""

    def __init__(
        self,
        job: str,
        layout: Layout,
        servers: Sequence[Server],
        term: int = 0,
        check: Callable[[], None] = lambda: None,
        tables: Sequence[Table] = (),
    ):
        """Args:
        term: of this coordinator; servers refuse one that is lower than another's.
        check: raises an error if this coordinator must not act any more.
        """
        self._job, self._term, self._check = job, term, check
        self._layout = layout
        self._owners = hashing.owners(layout, job, [s.name for s in servers])
        # A small model may leave a server without a block: it has no part in the job,
        # and without it all others keep theirs.
        names = [server.name for server in servers]
        self._tables = {
            x.name: (x, hashing.table_owners(x, job, names)) for x in tables
        }
        busy = set(self._owners.values())
        busy.update(*(owned.values() for _, owned in self._tables.values()))
        self._servers = sorted(
            (s for s in servers if s.name in busy), key=lambda server: server.name
        )
        self._pool = concurrent.futures.ThreadPoolExecutor(
            max_workers=len(self._servers), thread_name_prefix=f"servers of {job}"
        )

    @property
    def names(self) -> list[str]:
        return [server.name for server in self._servers]

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses by name; from the names learners know the owners of blocks."""
        return {server.name: server.address for server in self._servers}

    def all(self, method: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Calls all servers at once; returns their answers in order of their names."""
        return self._each(method, [dict(message)] * len(self._servers))

    def create(self, spec: Mapping[str, Any]) -> None:
        """Gives every server its blocks of the job; does nothing where it has them."""
        messages = []
        for name in self.names:
            tables = {
                t: _owned(owners, name) for t, (_, owners) in self._tables.items()
            }
            blocks = _owned(self._owners, name)
            messages.append({"spec": spec, "blocks": blocks, "tables": tables})
        self._each("Create", messages)

    def digests(self, version: int) -> dict[str, str]:
        """Returns the digest of every leaf, as the trainer computes it."""
        answers = self.all("Digest", {"version": version})
        found = {}
        tables = (table.layout.leaves[0] for table, _ in self._tables.values())
        for leaf in (*self._layout.leaves, *tables):
            sums = (0, 0)
            for part in answers:
                sums = add(sums, part["lanes"].get(leaf.path, (0, 0)))
            found[leaf.path] = digest_of(leaf, sums)
        return found

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _each(
        self, method: str, messages: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        self._check()
        about = {"job": self._job, "term": self._term}
        futures = [
            self._pool.submit(server.call, method, {**about, **message})
            for server, message in zip(self._servers, messages, strict=True)
        ]
        # All are awaited before the first error is raised: no call is left behind.
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]


def _owned(owners: Mapping[int, str], name: str) -> list[int]:
    return [block for block, owner in owners.items() if owner == name]
