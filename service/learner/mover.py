"""Pushes and pulls the shards of this process, to and from all servers at once."""

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..blocks.dtypes import dtype_of
from ..blocks.layout import Layout
from ..blocks.pieces import pieces
from ..wire.changes import Wanted
from ..wire.errors import Refused, Unavailable
from .servers import Servers
from .shards import Host, Piece

# A stream that breaks is repeated: pieces and reads are idempotent.
ATTEMPTS, PAUSE_SECONDS = 4, 0.5
# Where blocks have copies: until the coordinator has noticed a loss, and moved on.
MOVE_SECONDS = 45.0
LOOK_SECONDS = 1.0  # how often the coordinator is asked while a server does not answer
MAX_SERVERS = 1024  # threads are started as needed


class Mover:
    """Moves pieces of one job.

    Args:
      reached: called with "push" before a contribution is sent to each server; a drill
        may kill this process there.

    Attributes:
      epoch: of the servers to which the last push went.
    """

    def __init__(
        self,
        job: str,
        layout: Layout,
        servers: Servers,
        reached: Callable[[str], None] = lambda point: None,
    ):
        self._job, self._layout, self._servers = job, layout, servers
        self._reached = reached
        self._pulled: dict[int, int] = {}  # the version of each block
        self._pushed: tuple[Any, set[tuple]] = (None, set())
        self.epoch = 0
        self._threads = concurrent.futures.ThreadPoolExecutor(
            MAX_SERVERS, thread_name_prefix="mover"
        )

    def refresh(self) -> None:
        """Asks where the blocks are."""
        self._servers.refresh()

    def push(
        self,
        sent_pieces: Iterable[Piece],
        learner: int,
        incarnation: int,
        round: int,
    ) -> int:
        """Sends pieces of a contribution to all servers that must have them.

        What was sent to a server before is not sent again, unless servers came or went:
        one of the same name may have been started again, and lost it.

        Returns:
          The bytes sent.
        """
        parts = list(sent_pieces)
        nbytes, retries = 0, _Retries(self._servers)

        def send(server: str, parts: Sequence[Piece]) -> int:
            sent = ((p.block, p.slab, p.start, p.array) for p in parts)
            channel = self._servers.channel(server)
            self._reached("push")
            return channel.push(self._job, learner, incarnation, round, sent)["bytes"]

        while True:
            placement, targets = self._servers.where()
            key = learner, incarnation, round, placement.since
            if self._pushed[0] != key:
                self._pushed = key, set()
            done = self._pushed[1]
            todo: dict[str, list[Piece]] = {}
            for piece in parts:
                for name in targets[piece.block]:
                    if (name, piece.block, piece.slab, piece.start) not in done:
                        todo.setdefault(name, []).append(piece)
            if not todo:
                self.epoch = placement.epoch
                return nbytes
            found = self._at_all(send, todo)
            for name, count in found.items():
                if not isinstance(count, Exception):
                    done.update((name, p.block, p.slab, p.start) for p in todo[name])
                    nbytes += count
            retries.after(found.values(), placement.epoch)

    def pull(
        self,
        version: int,
        buffers: Host,
        fragment: int | None = None,
        base: Host | None = None,
    ) -> int:
        """Fills the buffers with a version; returns the bytes received.

        Args:
          fragment: only the blocks of this fragment; None for all.
          base: everything as it was pulled last, to receive what has changed since;
            None or empty to receive all elements.
        """
        wanted = self._wanted(buffers, fragment, base or {})
        tried = dict.fromkeys(wanted, 0)
        nbytes, retries = 0, _Retries(self._servers)

        def receive(server: str, blocks: Sequence[int]) -> int:
            channel = self._servers.channel(server)
            parts = [part for block in blocks for part in wanted[block]]
            if base:
                return channel.pull_changes(self._job, version, parts)
            into = {(w.leaf, w.box): w.into for w in parts}
            return channel.pull(self._job, version, list(into), into)

        while tried:
            placement, targets = self._servers.where()
            todo: dict[str, list[int]] = {}
            for block, times in tried.items():
                names = targets[block]
                todo.setdefault(names[times % len(names)], []).append(block)
            found = self._at_all(receive, todo)
            errors: list[int | Exception] = []
            for name, count in found.items():
                if not isinstance(count, Exception):
                    nbytes += count
                    for block in todo[name]:
                        del tried[block]
                    continue
                for block in todo[name]:
                    tried[block] += 1
                # One that will hold a block may not have it yet, one may be lost.
                if any(tried[b] % len(targets[b]) == 0 for b in todo[name]):
                    errors.append(count)
            retries.after(errors, placement.epoch)
        self._pulled |= dict.fromkeys(wanted, version)
        return nbytes

    def _wanted(
        self, buffers: Host, fragment: int | None, base: Host
    ) -> dict[int, list[Wanted]]:
        """Returns what to read of each block."""
        wanted: dict[int, list[Wanted]] = {}
        for (leaf, box), buffer in buffers.items():
            dtype = dtype_of(self._layout.leaves[leaf].dtype)
            for block, _, part in pieces(self._layout, leaf, box):
                if fragment not in (None, self._layout.fragment_of(block)):
                    continue
                # The dots keep an array without dimensions an array.
                index = (*part.slices(box), ...)
                want = Wanted(leaf, part, dtype, buffer[index])
                if base:
                    old, have = base[leaf, box][index], self._pulled[block]
                    want = want._replace(old=old, have=have)
                wanted.setdefault(block, []).append(want)
        return wanted

    def _at_all(
        self,
        work: Callable[[str, Any], int],
        todo: Mapping[str, Any],
    ) -> dict[str, int | Exception]:
        """Calls servers at once; returns what each has answered, or why it has not."""
        futures = {
            name: self._threads.submit(work, name, parts)
            for name, parts in todo.items()
        }
        seconds = LOOK_SECONDS if self._servers.may_move else None
        waiting: Any = futures.values()
        while waiting:
            _, waiting = concurrent.futures.wait(waiting, seconds)
            if waiting:
                self._servers.look()  # ends calls to servers that are lost
        return {name: _outcome(future) for name, future in futures.items()}

    def close(self) -> None:
        self._threads.shutdown()
        self._servers.close()


class _Retries:
    """Decides how long something is tried again."""

    def __init__(self, servers: Servers):
        self._servers = servers
        self._attempt, self._began = 0, time.monotonic()

    def after(self, outcomes: Iterable[int | Exception], epoch: int) -> None:
        """Returns when to try again what failed; raises the error if that is over.

        Args:
          epoch: of the servers that were called.
        """
        errors = [x for x in outcomes if isinstance(x, Exception)]
        if not errors:
            return
        self._attempt += 1
        servers, may_move = self._servers, self._servers.may_move
        if may_move:
            servers.look()
            if servers.where()[0].epoch != epoch:
                return
        for error in errors:
            if not isinstance(error, Unavailable):
                raise error
        is_over = self._attempt == ATTEMPTS
        if may_move:
            is_over = time.monotonic() - self._began > MOVE_SECONDS
        if is_over:
            raise errors[0]
        time.sleep(PAUSE_SECONDS * min(self._attempt, ATTEMPTS - 1))


def _outcome(future: concurrent.futures.Future[int]) -> int | Exception:
    try:
        return future.result()
    except Refused as error:
        return error
    except ValueError as error:  # gRPC's: the channel was closed, the server is lost
        return Unavailable(f"a server no longer serves this job ({error})")
    except Exception as error:
        return error


def retried(work: Callable[[str], int], server: str) -> int:
    """Returns what some work at a server returns; tries again if it breaks off."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return work(server)
        except Unavailable:
            if attempt == ATTEMPTS:
                raise
            time.sleep(PAUSE_SECONDS * attempt)
    raise AssertionError("unreachable")
