"""Pushes and pulls the shards of this process, to and from all servers at once."""

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..blocks.dtypes import dtype_of
from ..blocks.layout import Layout
from ..blocks.pieces import pieces
from ..wire.changes import Wanted
from ..wire.errors import NotHere, Refused, Unavailable
from ..wire.tensors import Packed, Sent
from .servers import Servers
from .shards import Host, Piece

# A stream that breaks is repeated: pieces and reads are idempotent.
ATTEMPTS, PAUSE_SECONDS = 4, 0.5
# After a break it goes on with what was not in a stream that came to its end.
STREAM_BYTES = 64 << 20
# Where blocks have copies: until the coordinator has noticed a loss, and moved on.
MOVE_SECONDS = 45.0
LOOK_SECONDS = 1.0  # how often the coordinator is asked while a server does not answer
MAX_SERVERS = 1024  # threads are started as needed
Item = TypeVar("Item")


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
        """Asks where the blocks are; waits for a coordinator that is away."""
        deadline = time.monotonic() + MOVE_SECONDS
        while True:
            try:
                return self._servers.refresh()
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_SECONDS)

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
        counts, retries = [], _Retries(self._servers)

        def send(server: str, parts: Sequence[Piece]) -> None:
            channel, done = self._servers.channel(server), self._pushed[1]
            self._reached("push")
            for part in _divided(parts, lambda piece: _size(piece.array)):
                sent = ((p.block, p.slab, p.start, p.array) for p in part)
                answer = channel.push(self._job, learner, incarnation, round, sent)
                counts.append(answer["bytes"])
                done.update((server, p.block, p.slab, p.start) for p in part)

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
                return sum(counts)
            before = len(done)
            found = self._at_all(send, todo)
            if len(done) > before:
                retries = _Retries(self._servers)  # what is slow may break off often
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
        counts, retries = [], _Retries(self._servers)

        def receive(server: str, blocks: Sequence[int]) -> None:
            channel = self._servers.channel(server)
            for part in _divided(blocks, lambda block: _bytes_of(wanted[block])):
                boxes = [box for block in part for box in wanted[block]]
                if base:
                    count = channel.pull_changes(self._job, version, boxes)
                else:
                    into = {(w.leaf, w.box): w.into for w in boxes}
                    count = channel.pull(self._job, version, list(into), into)
                counts.append(count)
                for block in part:
                    del tried[block]

        while tried:
            placement, targets = self._servers.where()
            todo: dict[str, list[int]] = {}
            for block, times in tried.items():
                names = targets[block]
                todo.setdefault(names[times % len(names)], []).append(block)
            before = len(tried)
            found = self._at_all(receive, todo)
            if len(tried) < before:
                retries = _Retries(self._servers)
            errors: list[Exception] = []
            for name, error in found.items():
                left = [block for block in todo[name] if block in tried]
                for block in left:
                    tried[block] += 1
                # One that will hold a block may not have it yet, one may be lost.
                if error and any(tried[b] % len(targets[b]) == 0 for b in left):
                    errors.append(error)
            retries.after(errors, placement.epoch)
        self._pulled |= dict.fromkeys(wanted, version)
        return sum(counts)

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
        work: Callable[[str, Any], None],
        todo: Mapping[str, Any],
    ) -> dict[str, Exception | None]:
        """Calls servers at once; returns why it has not worked with each, if so."""
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

    def after(self, outcomes: Iterable[Exception | None], epoch: int) -> None:
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
        # Servers learn where blocks belong one after the other, and learners last.
        passing = (Unavailable, NotHere) if may_move else Unavailable
        for error in errors:
            if not isinstance(error, passing):
                raise error
        is_over = self._attempt == ATTEMPTS
        if may_move:
            is_over = time.monotonic() - self._began > MOVE_SECONDS
        if is_over:
            raise errors[0]
        time.sleep(PAUSE_SECONDS * min(self._attempt, ATTEMPTS - 1))


def _divided(
    items: Sequence[Item], size: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Yields items in order, as many at a time as STREAM_BYTES, or one."""
    part: list[Item] = []
    total = 0
    for item in items:
        if part and total + size(item) > STREAM_BYTES:
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part


def _size(array: Sent) -> int:
    return array.data.nbytes if isinstance(array, Packed) else array.nbytes


def _bytes_of(boxes: Iterable[Wanted]) -> int:
    return sum(box.into.nbytes for box in boxes)


def _outcome(future: concurrent.futures.Future[None]) -> Exception | None:
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
