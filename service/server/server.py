"""A server: the stores of several jobs, called by a coordinator and by learners.

`BlockServer` has the methods and no network; `ServerProcess` answers calls over gRPC,
and tells a coordinator that it is there.
"""

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from ..blocks.box import Box
from ..blocks.pieces import pieces
from ..wire import changes, tensors
from ..wire.calls import Channel, Download, Server, Upload
from ..wire.coordinators import reach
from ..wire.credentials import Tls
from ..wire.errors import OldTerm, Refused, Unavailable
from ..wire.messages import Message, decode
from . import copying
from .fence import Fence
from .job_store import JobStore
from .receiving import Receiving
from .update import MakeUpdate, no_optimizers

BEAT_SECONDS = 2.0
RETRY_SECONDS = 0.5  # while no coordinator answers
# With the last server the coordinator takes up its jobs, which loads checkpoints.
REGISTER_SECONDS = 300.0
FETCH_SECONDS = 10.0  # commits wait meanwhile
# What a store is made of; the rest of a job's spec is for others.
PARTS = ("layout", "policy", "update", "tables")
_LOG = logging.getLogger(__name__)


class BlockServer:
    """The blocks of several jobs.

    Attributes:
      methods: name -> function of a message that returns the answer.
      streams: the same for Push and Pull, which move tensors.
      fence: refuses the orders of a coordinator that was deposed.
    """

    def __init__(
        self,
        make_update: MakeUpdate = no_optimizers,
        connect: Callable[[str], Channel] = Channel,
        reached: Callable[[str], None] = lambda point: None,
    ):
        """Args:
        make_update: makes the updates that run a trainer's own optimizer.
        connect: makes a channel to another server, from its address.
        reached: called with "apply" before a commit is applied; a drill may kill
          this process there.
        """
        self._make_update, self._connect = make_update, connect
        self._reached = reached
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[Mapping[str, Any], JobStore]] = {}
        self._moved = {"received_bytes": 0, "sent_bytes": 0}  # since it was started
        self.fence = Fence()
        orders: dict[str, Callable[[Message], Message]] = {
            "Create": self.create,
            "Place": self.place,
            "Fetch": self.fetch,
            "Merge": self.merge,
            "Apply": self.apply,
            "Digest": self.digest,
            "Save": self.save,
            "Load": self.load,
            "Drop": self.drop,
            "Forget": self.forget,
        }
        self.methods = {
            name: self.fence.guarded(order) for name, order in orders.items()
        }
        self.methods["Status"] = self.status
        self.streams = {
            "Push": Upload(self.push),
            "Pull": Download(self.pull),
            "PullChanges": Download(self.pull_changes),
            "PushRows": Upload(self.push_rows),
            "PullRows": Download(self.pull_rows),
            "Copy": Download(self.copy),
        }

    def create(self, message: Message) -> Message:
        """Makes the store of a job; keeps the one that is there for the same blocks.

        For other blocks of the same job (the servers changed) the store starts empty,
        and the coordinator loads a checkpoint.
        """
        job, spec, blocks = fields(message, "job", "spec", "blocks")
        tables = message.get("tables", {})
        with self._lock:
            if job in self._jobs:
                old, store = self._jobs[job]
                for part in PARTS:
                    if old.get(part) != spec.get(part):
                        raise Refused(
                            f"job {job!r} is here with another {part}; choose another "
                            "name, or restart the servers"
                        )
                if store.holds(blocks, tables):
                    return {"version": store.newest}
                _LOG.warning("job %r: other blocks than before; starts empty", job)
            store = JobStore(
                *(spec, blocks, tables),
                make_update=self._make_update,
                version=message.get("newest"),
            )
            self._jobs[job] = spec, store
            return {"version": store.newest}

    def place(self, message: Message) -> Message:
        """Says which blocks belong here, and which of them count."""
        job, blocks, counted = fields(message, "job", "blocks", "counted")
        self._store(job).place(blocks, counted)
        return {}

    def fetch(self, message: Message) -> Message:
        """Copies blocks from the server at an address; says which have arrived."""
        job, source, version, blocks = fields(
            message, "job", "source", "version", "blocks"
        )
        store, channel = self._store(job), self._connect(source)
        about = {"job": job, "version": version, "blocks": blocks}
        arrived: list[int] = []
        failed = None
        try:
            with contextlib.closing(channel):
                stream = channel.download("Copy", about, limit=FETCH_SECONDS)
                arrived.extend(copying.decode(store, stream))
        except (ConnectionError, Refused) as error:  # the other server is lost, maybe
            failed = f"blocks did not arrive from {source}: {error}"
        return {"arrived": arrived, "failed": failed}

    def copy(self, message: Message) -> Iterator[bytes]:
        """Sends blocks to another server."""
        job, version, blocks = fields(message, "job", "version", "blocks")
        return self._counted(copying.encode(self._store(job), version, blocks))

    def push(self, messages: Iterator[bytes]) -> Message:
        """Receives pieces of a contribution, after a message that says whose."""
        first = next(messages, None)
        if first is None:
            raise Refused("push: expected a message with job, learner and round first")
        names = ("job", "learner", "incarnation", "round")
        job, *numbers = fields(decode(first), *names)
        store, key = self._store(job), (numbers[0], numbers[1], numbers[2])
        receiving = Receiving(store, key)
        try:
            nbytes = tensors.decode(
                messages, ("block", "slab"), receiving.target, receiving.done
            )
        finally:
            receiving.close()
        self._count("received_bytes", nbytes)
        return {"bytes": nbytes}

    def pull(self, message: Message) -> Iterator[bytes]:
        """Sends boxes of a version."""
        job, version, rows = fields(message, "job", "version", "boxes")
        store = self._store(job)
        boxes = [(leaf, Box(tuple(start), tuple(stop))) for leaf, start, stop in rows]
        # All are looked up first: a version stays readable while it is being sent.
        found = [store.read(version, leaf, box) for leaf, box in boxes]
        chunks = tensors.encode(
            ({"leaf": leaf}, box.start, array)
            for (leaf, box), array in zip(boxes, found, strict=True)
        )
        return self._counted(chunks)

    def pull_changes(self, message: Message) -> Iterator[bytes]:
        """Sends boxes of a version, or what has changed since somebody read them."""
        job, version, rows, have = fields(message, "job", "version", "boxes", "have")
        store = self._store(job)
        boxes = [(leaf, Box(tuple(start), tuple(stop))) for leaf, start, stop in rows]
        found = []
        for (leaf, box), old in zip(boxes, have, strict=True):
            elements = store.read(version, leaf, box)
            parts = pieces(store.layout, leaf, box)
            since = None
            if len(parts) == 1:  # the changes of a box are those of its block
                since = store.chain.since(old, version, *parts[0])
            found.append((elements, since))
        return self._counted(changes.encode(boxes, found))

    def push_rows(self, messages: Iterator[bytes]) -> Message:
        """Receives rows of a table as a part of a contribution."""
        first = next(messages, b"")
        (job,) = fields(decode(first), "job")
        answer = self._store(job).push_rows(itertools.chain([first], messages))
        self._count("received_bytes", answer["bytes"])
        return answer

    def pull_rows(self, message: Message) -> Iterator[bytes]:
        """Sends rows of a table."""
        (job,) = fields(message, "job")
        return self._counted(self._store(job).pull_rows(message))

    def merge(self, message: Message) -> Message:
        names = ("version", "fragment", "contributions", "divisor")
        job, *rest = fields(message, "job", *names)
        return self._store(job).merge(*rest)

    def apply(self, message: Message) -> Message:
        names = ("version", "scale", "step", "share", "keep", "drop")
        job, *rest = fields(message, "job", *names)
        self._reached("apply")
        return self._store(job).apply(*rest)

    def digest(self, message: Message) -> Message:
        job, version = fields(message, "job", "version")
        return {"lanes": self._store(job).digest_lanes(version)}

    def save(self, message: Message) -> Message:
        job, folder, version = fields(message, "job", "folder", "version")
        try:
            return self._store(job).save(folder, version)
        except OSError as error:
            raise Refused(
                f"version {version} of job {job!r} was not saved to "
                f"{error.filename or folder}: {error.strerror or error}"
            ) from error

    def load(self, message: Message) -> Message:
        job, folder, version = fields(message, "job", "folder", "version")
        self._store(job).load(folder, version)
        return {"version": version}

    def drop(self, message: Message) -> Message:
        """Forgets contributions: [[learner, incarnation, round or null], ...]."""
        job, contributions = fields(message, "job", "contributions")
        return {"bytes": self._store(job).drop(contributions)}

    def forget(self, message: Message) -> Message:
        """Frees the memory of a job that is over; one that is not here is fine."""
        (job,) = fields(message, "job")
        with self._lock:
            self._jobs.pop(job, None)
        return {}

    def status(self, message: Message) -> Message:
        """Returns the state of a job, or of all if none is named; anybody may ask."""
        if "term" in message:  # a coordinator, which acts on the answer
            with self.fence.entered(message):
                return self._store(message["job"]).status()
        if "job" in message:
            return self._store(message["job"]).status()
        with self._lock:
            stores = [store for _, store in self._jobs.values()]
        return {"jobs": [store.status() for store in stores]}

    def held(self) -> Message:
        """Returns what this server holds, and has moved since it was started."""
        with self._lock:
            stores = [store for _, store in self._jobs.values()]
            moved = dict(self._moved)
        jobs = []
        for status in (store.status() for store in stores):
            kept = {
                name: status[name] for name in ("job", "version", "blocks", "bytes")
            }
            jobs.append({**kept, "staged": len(status["staged"])})
        sums = ("blocks", "bytes", "staged")
        return {**{n: sum(job[n] for job in jobs) for n in sums}, **moved, "jobs": jobs}

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._count("sent_bytes", len(chunk))
            yield chunk

    def _count(self, what: str, nbytes: int) -> None:
        with self._lock:
            self._moved[what] += nbytes

    def _store(self, job: str) -> JobStore:
        with self._lock:
            if job not in self._jobs:
                raise Refused(
                    f"this server has no job {job!r}, but {sorted(self._jobs)}; was it "
                    "restarted?"
                )
            return self._jobs[job][1]


def fields(message: Message, *names: str) -> list[Any]:
    """Returns values of a message; refuses one that lacks any."""
    missing = [name for name in names if name not in message]
    if missing:
        raise Refused(
            f"message without {', '.join(missing)}: do both sides have the same "
            "version of meshloom?"
        )
    return [message[name] for name in names]


class ServerProcess:
    """Answers calls, and beats to the coordinator until closed.

    A coordinator that was restarted, and does not know this server, gets it registered
    again.

    Attributes:
      address: under which others reach it.
    """

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        name: str | None = None,
        host: str | None = None,
        coordinator: str | None = None,
        make_update: MakeUpdate = no_optimizers,
        token: str | None = None,
        tls: Tls | None = None,
        reached: Callable[[str], None] = lambda point: None,
    ):
        """Args:
        name: by which blocks are dealt to servers; its address by default. A server
          that keeps its name across restarts keeps its blocks.
        host: under which others reach this machine; that of `bind` by default.
        coordinator: address to register at; those of several with commas between.
        reached: see BlockServer.
        """
        connect = functools.partial(Channel, token=token, tls=tls)
        self.blocks = BlockServer(make_update, connect, reached)
        self._server = Server(
            bind, self.blocks.methods, self.blocks.streams, token, tls
        )
        self.address = f"{host or bind.rpartition(':')[0]}:{self._server.port}"
        self.name = name or self.address
        self._is_closing = threading.Event()
        self._thread = None
        if coordinator is not None:
            self._channel = reach(coordinator, token, tls)
            try:
                self._register()
            except BaseException:
                self._server.close(0)
                self._channel.close()
                raise
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()

    def may_leave(self) -> bool:
        """Asks the coordinator to leave; returns whether no job needs this server."""
        answer = self._channel.call("LeaveServer", {"name": self.name}, BEAT_SECONDS)
        return bool(answer["is_free"])

    def close(self) -> None:
        """Stops beating and answering."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()
            self._channel.close()
        self._server.close()

    def _register(self) -> None:
        version = metadata.version("meshloom")
        message = {"name": self.name, "address": self.address, "version": version}
        answer = self._channel.call("RegisterServer", message, REGISTER_SECONDS)
        try:
            self.blocks.fence.admit(answer.get("term", 0))
        except OldTerm as error:
            raise Refused(str(error)) from error

    def _beat(self) -> None:
        is_reached = True
        while not self._is_closing.wait(BEAT_SECONDS if is_reached else RETRY_SECONDS):
            try:
                self._beat_once()
            except Unavailable as error:
                if is_reached:
                    _LOG.warning("server %s: %s; keeps trying", self.name, error)
                is_reached = False
            except Refused as error:
                _LOG.error("server %s: %s; keeps trying", self.name, error)
            else:
                is_reached = True

    def _beat_once(self) -> None:
        try:
            beat = {"name": self.name, "held": self.blocks.held()}
            self._channel.call("Beat", beat, BEAT_SECONDS)
        except Refused as error:
            _LOG.warning("server %s registers again: %s", self.name, error)
            self._register()
