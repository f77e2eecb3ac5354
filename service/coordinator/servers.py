"""The servers of a job, called all at once; every call may be repeated safely."""

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol

from ..blocks import hashing
from ..blocks.digest import add, digest_of
from ..blocks.layout import Layout
from ..blocks.placement import Placement
from ..blocks.tables import Table
from ..wire.errors import Refused, Unavailable

# A call that merges, updates or saves all blocks of a server. Beats tell much sooner
# that a server is dead; this is for one that lives and does not answer.
CALL_SECONDS = 300.0
# So long may a checkpoint take; beyond the limit of `serve`, it would never be there.
SLOW_SECONDS = {"Save": 3600.0, "Load": 3600.0}
RETRY_SECONDS = 0.2
MAX_SERVERS = 1024  # threads are started as needed


class ServerLost(Exception):
    """A server is gone, or has lost what it held; the message names it."""

    def __init__(self, name: str, why: str):
        super().__init__(f"server {name} is lost: {why}")
        self.name = name


class BlocksLost(ServerLost):
    """A server is gone that had the only copy of some blocks."""


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
        deadline = time.monotonic() + SLOW_SECONDS.get(method, CALL_SECONDS)
        while True:
            left = deadline - time.monotonic()
            if self._lost.is_set():
                raise ServerLost(self.name, f"{method} was not called")
            try:
                return self._channel.call(method, message, max(left, RETRY_SECONDS))
            except Unavailable as error:
                if self._lost.is_set() or time.monotonic() > deadline:
                    why = f"{method}: {error}"
                    if method in SLOW_SECONDS and not self._lost.is_set():
                        why += f" of {SLOW_SECONDS[method]:g} s. Use a faster disk for "
                        why += "checkpoints, or more servers"
                    raise ServerLost(self.name, why) from error
            except ValueError as error:
                if isinstance(error, Refused) or not self._lost.is_set():
                    raise
                # gRPC's: the channel was closed.
                raise ServerLost(self.name, f"{method} was not called") from error
            self._lost.wait(RETRY_SECONDS)


class ServerGroup:
    """The servers of one job, and which of them has which block.

    With several copies of each block, a server that is lost leaves the group, and calls
    continue with the others. `note`, `leave`, `is_free`, `can_spare` and `describe` are
    for any thread, all else is for the thread of the job.

    Attributes:
      placement: where the blocks are, and where they will be.
      held: for each server, the blocks that it has.
    """

    def __init__(
        self,
        job: str,
        layout: Layout,
        servers: Sequence[Server],
        term: int = 0,
        check: Callable[[], None] = lambda: None,
        tables: Sequence[Table] = (),
        *,
        copies: int = 1,
        record: Callable[[Placement, str], None] = lambda placement, why: None,
    ):
        """Args:
        term: of this coordinator; servers refuse one that is lower than another's.
        check: raises an error if this coordinator must not act any more.
        tables: whose blocks do not move; only with one copy.
        copies: of each block, each on another server.
        record: called with every new placement, and why it changed, before it counts.
        """
        self._job, self._term, self._check = job, term, check
        self._layout, self._tables, self._record = layout, tables, record
        self._servers = {server.name: server for server in servers}
        self._noted: queue.SimpleQueue[tuple[str, Server | None]] = queue.SimpleQueue()
        self.leaving: set[str] = set()  # servers that asked for it
        self.held: dict[str, set[int]] = {}
        self._rows: dict[str, dict[str, list[int]]] = {}  # blocks of tables, by server
        self.placement = Placement(copies=copies, epoch=-1, before=(), members=())
        self.reform()
        self._told = self.placement  # what servers know already, and learners may
        self._pool = concurrent.futures.ThreadPoolExecutor(
            max_workers=MAX_SERVERS, thread_name_prefix=f"servers of {job}"
        )

    def reform(self) -> None:
        """Places all blocks anew, on all servers that are there."""
        assert self._servers, "no server is left"
        copies, epoch = self.placement.copies, self.placement.epoch + 1
        names = [*self._servers]
        found = hashing.holders(self._layout, self._job, names, copies)
        # A small model may leave a server without a block: it has no part in the job,
        # and without it all others keep theirs.
        tables = {
            t.name: hashing.table_owners(t, self._job, names) for t in self._tables
        }
        self._rows = {
            name: {table: _owned(owners, name) for table, owners in tables.items()}
            for name in names
        }
        busy = {name for holders in found.values() for name in holders}
        busy.update(*(owners.values() for owners in tables.values()))
        live = tuple(sorted(busy))
        self.placement = Placement(
            copies=copies, epoch=epoch, since=epoch, before=live, members=live
        )
        self.held = {
            name: {block for block, holders in found.items() if name in holders}
            for name in live
        }

    @property
    def names(self) -> list[str]:
        return list(self.placement.live)

    @property
    def is_left(self) -> bool:
        """Whether any server is there."""
        return bool(self._servers)

    @property
    def newcomers(self) -> list[str]:
        """Servers that are there and have no part in the job."""
        known = self._servers.keys() - self.leaving
        return sorted(known - {*self.placement.live})

    def address(self, name: str) -> str:
        return self._servers[name].address

    def describe(self) -> dict[str, Any]:
        """Returns what learners need to find the blocks; for any thread."""
        placement, servers = self._told, dict(self._servers)
        live = {n: servers[n].address for n in placement.live if n in servers}
        return {"servers": live, "placement": placement.to_json()}

    def all(self, method: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Calls all servers at once; returns their answers in order of their names."""
        while True:
            try:
                return self.each(method, dict.fromkeys(self.names, message))
            except ServerLost as error:
                self.lose(error)

    def each(
        self, method: str, messages: Mapping[str, Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Calls servers at once, each with its message, as `all` does."""
        self._check()
        about = {"job": self._job, "term": self._term}
        futures = [
            self._pool.submit(self._call, name, method, {**about, **message})
            for name, message in messages.items()
        ]
        # All are awaited before the first error is raised: no call is left behind.
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def _call(self, name: str, method: str, message: dict[str, Any]) -> dict[str, Any]:
        server = self._servers[name]
        try:
            return server.call(method, message)
        except Refused as error:
            if self.placement.copies == 1 or method == "Status":
                raise
            try:
                server.call("Status", {"job": self._job, "term": self._term})
            except Refused:  # it does not know the job
                raise ServerLost(name, f"it was started again: {error}") from error
            raise

    def create(self, spec: Mapping[str, Any]) -> None:
        """Gives every server its blocks of the job; does nothing where it has them."""
        while True:
            orders = {
                name: {"spec": spec, "blocks": sorted(held), "tables": self._rows[name]}
                for name, held in self.held.items()
            }
            try:
                self.each("Create", orders)
            except ServerLost as error:
                if self.placement.copies == 1 or len(self._servers) == 1:
                    raise
                del self._servers[error.name]
                self.reform()
            else:
                self.record("the blocks are placed")
                return self._tell()

    def digests(self, version: int) -> dict[str, str]:
        """Returns the digest of every leaf, as the trainer computes it."""
        answers = self.all("Digest", {"version": version})
        found = {}
        tables = (table.layout.leaves[0] for table in self._tables)
        for leaf in (*self._layout.leaves, *tables):
            sums = (0, 0)
            for part in answers:
                sums = add(sums, part["lanes"].get(leaf.path, (0, 0)))
            found[leaf.path] = digest_of(leaf, sums)
        return found

    def save(self, folder: str, version: int) -> None:
        """Saves all blocks; raises a ValueError if two copies of one differ."""
        answers = self.all("Save", {"folder": folder, "version": version})
        if self.placement.copies == 1:
            return
        seen: dict[str, tuple[str, int]] = {}
        for name, answer in zip(self.names, answers, strict=True):
            for block, crc in answer["crcs"].items():
                first, expected = seen.setdefault(block, (name, crc))
                if crc != expected:
                    raise ValueError(
                        f"job {self._job!r}, version {version}: the copies of block "
                        f"{block} on servers {first} and {name} differ. Run all "
                        "servers on the same kind of CPU and with the same versions"
                    )

    # Servers that come and go.

    def note(self, name: str, server: Server | None) -> None:
        """Notes that a server is lost (None), or has come; for any thread."""
        self._noted.put((name, server))

    def is_free(self, name: str) -> bool:
        """Returns whether a server has no part in the job; for any thread."""
        return name not in self.placement.live and name not in self._told.live

    def can_spare(self, name: str) -> bool:
        """Returns whether others have all blocks of a server; for any thread."""
        placement = self.placement
        rest = {*placement.live} - {name}
        return placement.is_held_by(self._layout, self._job, rest)

    def leave(self, name: str) -> None:
        """Notes that a server asks to leave, once others have its blocks."""
        self.leaving.add(name)

    def take_notes(self) -> None:
        """Takes in servers that have come, and lets go of those that are lost."""
        while not self._noted.empty():
            name, server = self._noted.get()
            self.leaving.discard(name)
            if server is not None:
                self._servers[name] = server
            elif name in self.placement.live:
                self.lose(ServerLost(name, "it was not heard of"))
            else:
                self._servers.pop(name, None)

    def lose(self, error: ServerLost) -> None:
        """Goes on without a server; raises BlocksLost if another copy is missing."""
        if self.placement.copies == 1:
            raise error
        placement = self.placement.without(error.name)
        self.held.pop(error.name, None)
        missing = len(self._layout.blocks) - len(set().union(*self.held.values()))
        if missing:
            del self._servers[error.name]
            self.placement = placement
            raise BlocksLost(error.name, f"it had the only copy of {missing} blocks")
        self.change(placement, str(error))

    def change(self, placement: Placement, why: str) -> None:
        """Makes a placement count, and tells the servers."""
        self._record(placement, why)
        gone = {*self.placement.live} - {*placement.live}
        self.placement = placement
        for name in gone:
            self._servers.pop(name, None)
            self.held.pop(name, None)
        self._tell()

    def record(self, why: str) -> None:
        """Records where the blocks are, if they may move."""
        if self.placement.copies > 1:
            self._record(self.placement, why)

    def resume(self, placement: Placement, versions: Container[int]) -> bool:
        """Takes up a placement of the log; returns whether every block is there.

        Args:
          versions: that servers may be at.
        """
        self.placement, self.held, lost = placement, {}, []
        for name in placement.live:
            answer: dict[str, Any] = {"version": None}
            if name in self._servers:
                with contextlib.suppress(Refused, ServerLost):  # it has no such job
                    (answer,) = self.each("Status", {name: {}})
            if answer["version"] in versions:
                self.held[name] = set(answer["held"])
            else:
                lost.append(name)
        if len(set().union(*self.held.values())) < len(self._layout.blocks):
            return False
        servers = dict(self._servers)
        if not lost:
            self._tell()
            return True
        for name in lost:
            placement = placement.without(name)
        self.change(placement, f"servers that are gone: {', '.join(lost)}")
        self._servers |= {n: servers[n] for n in lost if n in servers}
        return True

    def _tell(self) -> None:
        """Tells servers which blocks belong to them, and which of them count."""
        if self.placement.copies == 1:
            self._told = self.placement
            return  # they know it since they have created the job
        blocks: dict[str, list[int]] = {name: [] for name in self.names}
        counted: dict[str, list[int]] = {name: [] for name in self.names}
        targets = self.placement.targets(self._layout, self._job)
        for block, names in targets.items():
            for name in names:
                blocks[name].append(block)
            holders = (n for n in names if block in self.held.get(n, ()))
            counted[next(holders)].append(block)
        messages = {n: {"blocks": blocks[n], "counted": counted[n]} for n in blocks}
        for name, held in self.held.items():
            held &= set(blocks[name])
        try:
            self.each("Place", messages)
        except ServerLost as error:
            self.lose(error)  # which tells the others
        self._told = self.placement

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _owned(owners: Mapping[int, str], name: str) -> list[int]:
    return [block for block, owner in owners.items() if owner == name]
