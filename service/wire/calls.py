"""Calls between processes: JSON messages and byte streams over gRPC.

Generic handlers with the bytes as they are: no protobuf, and nothing is unpickled. A
handler says no by raising Refused (or another ValueError), whose message the caller
gets in a Refused of its own.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import grpc
import numpy as np

from ..blocks.box import Box
from . import changes, credentials, messages, tensors
from .credentials import Tls
from .errors import (
    Busy,
    NotHere,
    NotLeader,
    NoUpstream,
    OldTerm,
    Refused,
    Unavailable,
)
from .messages import Message
from .silence import Silence, guarded

Handler = Callable[[Message], Message]

SERVICE = "meshloom"
LEADER_KEY = "leader"  # in the metadata of an answer: who leads instead
# Chunks of tensors have 512 KiB. The spec of a job has some 50 bytes for each block.
MAX_MESSAGE = 64 << 20
# A stream may take as long as it needs, but may not stand still for so long.
SILENT_SECONDS = 120.0
# Connections that are silent are asked for a heartbeat, so that a partition is
# noticed; a server allows it as often as clients do it.
OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)
# A server that restarts is found again within seconds, not gRPC's two minutes.
RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
)
_LOG = logging.getLogger(__name__)


class Upload(NamedTuple):
    """A method whose caller sends a stream of messages and gets one answer."""

    handle: Callable[[Iterator[bytes]], Message]


class Download(NamedTuple):
    """A method whose caller sends one message and gets a stream."""

    handle: Callable[[Message], Iterator[bytes]]


class Server:
    """Answers calls in threads, until closed.

    Attributes:
      port: the one that was bound, also if 0 was asked for.
    """

    def __init__(
        self,
        bind: str,
        methods: Mapping[str, Handler],
        streams: Mapping[str, Upload | Download] | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        num_threads: int = 256,
    ):
        """Args:
        bind: HOST:PORT.
        token: that callers must show.
        num_threads: calls that are answered at the same time, including those that
          wait in a handler; more of them queue. Threads are started as needed.
        """
        credentials.check_token(token)
        credentials.check_bind(bind, token, tls)
        self._pool = futures.ThreadPoolExecutor(num_threads, "calls")
        # Without it, Linux lets two servers share a port, each getting half the calls.
        options = (*OPTIONS, ("grpc.so_reuseport", 0))
        self._server = grpc.server(self._pool, options=options)
        handlers = {n: _unary(n, handler, token) for n, handler in methods.items()}
        handlers |= {n: _stream(n, s, token) for n, s in (streams or {}).items()}
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self.port = self._bind(bind, tls)
        self._server.start()

    def _bind(self, bind: str, tls: Tls | None) -> int:
        try:
            if tls is None:
                port = self._server.add_insecure_port(bind)
            else:
                port = self._server.add_secure_port(bind, tls.server_credentials())
        except RuntimeError as error:
            self._pool.shutdown()
            raise ValueError(
                f"cannot bind {bind}: is the port taken, or the address not of this "
                "machine? Choose another, or port 0 for any free one"
            ) from error
        return port

    def close(self, seconds: float = 1.0) -> None:
        """Stops answering; calls under way get this long to finish."""
        self._server.stop(seconds).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)


Into = Mapping[tuple[int, Box], np.ndarray] | Callable[[int, Box, np.ndarray], None]


class Channel:
    """Calls one server. Threads can share it; processes cannot (never fork with one).

    Every method raises Refused if the other side said no, and Unavailable if it gave no
    answer within `seconds`; of a stream, if nothing has moved for so long.
    """

    def __init__(self, address: str, token: str | None = None, tls: Tls | None = None):
        credentials.check_token(token)
        self.address = address
        self._metadata = credentials.metadata(token)
        options = (*OPTIONS, *RECONNECT)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(
                address, tls.channel_credentials(), options=options
            )

    def call(self, name: str, message: Message, seconds: float = 30.0) -> Message:
        """Sends a message and returns the answer."""
        method = self._channel.unary_unary(f"/{SERVICE}/{name}")
        with self._translating(name):
            data = messages.encode(message)
            answer = method(data, timeout=seconds, metadata=self._metadata)
            return messages.decode(answer)

    def upload(
        self, name: str, stream: Iterator[bytes], seconds: float = SILENT_SECONDS
    ) -> Message:
        """Sends a stream of messages and returns the answer."""
        method = self._channel.stream_unary(f"/{SERVICE}/{name}")
        # An exception of the generator would be lost in a thread of gRPC.
        failed: list[BaseException] = []
        silence = Silence(seconds)
        watched = guarded(stream, failed, silence.moved)
        call = method.future(watched, metadata=self._metadata)
        silence.watch(call)
        try:
            with self._translating(name, silence):
                return messages.decode(call.result())
        finally:
            silence.close()
            call.cancel()  # if this thread was interrupted
            if failed:
                raise failed[0]

    def download(
        self,
        name: str,
        message: Message,
        seconds: float = SILENT_SECONDS,
        limit: float | None = None,
    ) -> Generator[bytes, None, None]:
        """Sends a message and yields the messages of the answer.

        Args:
          limit: on the seconds of all of it, if there is one.
        """
        method = self._channel.unary_stream(f"/{SERVICE}/{name}")
        data = messages.encode(message)
        stream = method(data, timeout=limit, metadata=self._metadata)
        silence = Silence(seconds)
        silence.watch(stream)
        try:
            with self._translating(name, silence):
                for part in stream:
                    silence.moved()
                    yield part
        finally:
            silence.close()
            stream.cancel()

    def push(
        self,
        job: str,
        learner: int,
        incarnation: int,
        round: int,
        pieces: Iterable[tuple[int, int, Sequence[int], tensors.Sent]],
        seconds: float = SILENT_SECONDS,
    ) -> Message:
        """Sends pieces of a contribution; returns {"bytes": their number}.

        Args:
          pieces: (block, slab, start in the coordinates of the leaf, array or packed).
        """
        about = {"job": job, "learner": learner}
        about |= {"incarnation": incarnation, "round": round}

        def stream() -> Iterator[bytes]:
            yield messages.encode(about)
            yield from tensors.encode(
                ({"block": block, "slab": slab}, start, array)
                for block, slab, start, array in pieces
            )

        return self.upload("Push", stream(), seconds)

    def pull(
        self,
        job: str,
        version: int,
        boxes: Sequence[tuple[int, Box]],
        into: Into,
        seconds: float = SILENT_SECONDS,
    ) -> int:
        """Reads parameters of a version; returns the number of bytes.

        Args:
          boxes: (leaf, box) of what to read.
          into: {(leaf, box): array to fill}, or a function that is called with (leaf,
            box, array). The array is used again after the function returns.
        """
        rows = [[leaf, list(box.start), list(box.stop)] for leaf, box in boxes]
        message = {"job": job, "version": version, "boxes": rows}
        target, done, check = tensors.reading(boxes, into)
        stream = self.download("Pull", message, seconds)
        with contextlib.closing(stream):
            nbytes = tensors.decode(stream, ("leaf",), target, done)
        check()
        return nbytes

    def pull_changes(
        self,
        job: str,
        version: int,
        wanted: Sequence[changes.Wanted],
        seconds: float = SILENT_SECONDS,
    ) -> int:
        """Reads boxes of a version, as changes if possible; returns the bytes."""
        message = {"job": job, "version": version, **changes.request(wanted)}
        stream = self.download("PullChanges", message, seconds)
        with contextlib.closing(stream):
            return changes.receive(stream, wanted)

    def close(self) -> None:
        self._channel.close()

    @contextlib.contextmanager
    def _translating(self, name: str, silence: Silence | None = None) -> Iterator[None]:
        """Turns the status of a call into Refused or Unavailable."""
        try:
            yield
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if silence is not None and silence.is_over:
                raise Unavailable(
                    f"{self.address}: no answer to {name} in time: nothing has moved "
                    f"for {silence.seconds:g} s"
                ) from error
            if isinstance(error, grpc.FutureCancelledError):
                text = f"{self.address}: no answer to {name} (it was cancelled)"
                raise Unavailable(text) from error
            assert isinstance(error, grpc.Call)
            details, code = error.details() or "", error.code()
            if code == grpc.StatusCode.FAILED_PRECONDITION:
                raise NotLeader(details, _leader_in(error)) from error
            raise _error_of(code, details, self.address, name) from error


def _error_of(
    code: grpc.StatusCode, details: str, address: str, name: str
) -> Exception:
    """Returns the exception for the status of a call."""
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        return Refused(details)
    if code == grpc.StatusCode.NOT_FOUND:
        return NotHere(details)
    if code == grpc.StatusCode.ABORTED:
        return OldTerm(f"{address}: {details}")
    if code == grpc.StatusCode.ALREADY_EXISTS:  # what was asked is in the queue
        return Busy(f"{address}: {details}")
    if code == grpc.StatusCode.OUT_OF_RANGE:
        return NoUpstream(f"{address}: {details}")
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return Refused(
            f"{address} refused {name}: {details}; give the token that its processes "
            "were started with"
        )
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return Refused(
            f"{address} has no method {name}: is it another kind of process, or of "
            "another version of meshloom?"
        )
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return Refused(f"{address}: {details}; its log says more")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"{address}: no answer to {name} in time")
    return Unavailable(f"{address}: no answer to {name} ({details})")


def _leader_in(call: grpc.Call) -> str | None:
    """Returns the address of the leader that an answer names."""
    found = [str(v) for k, v in call.trailing_metadata() or () if k == LEADER_KEY]
    return found[0] if found else None


def _unary(name: str, handler: Handler, token: str | None) -> Any:
    def behavior(request: bytes, context: grpc.ServicerContext) -> bytes:
        with _answering(name, context, token):
            return messages.encode(handler(messages.decode(request)))
        raise AssertionError("a call that fails is aborted")

    return grpc.unary_unary_rpc_method_handler(behavior)


def _stream(name: str, stream: Upload | Download, token: str | None) -> Any:
    if isinstance(stream, Upload):

        def upload(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            with _answering(name, context, token):
                return messages.encode(stream.handle(requests))
            raise AssertionError("a call that fails is aborted")

        return grpc.stream_unary_rpc_method_handler(upload)

    def download(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with _answering(name, context, token):
            yield from stream.handle(messages.decode(request))

    return grpc.unary_stream_rpc_method_handler(download)


class _Stranger(Exception):
    pass


@contextlib.contextmanager
def _answering(
    name: str, context: grpc.ServicerContext, token: str | None
) -> Iterator[None]:
    """Lets in who shows the token, and turns exceptions into the status of a call."""
    try:
        if not credentials.is_authorized(context, token):
            raise _Stranger
        yield
        return
    except _Stranger:
        status = grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token"
    except grpc.RpcError:
        # The stream of requests ended with the call: nobody is left to answer.
        _LOG.info("%s: the caller %s went away", name, context.peer())
        status = grpc.StatusCode.CANCELLED, "the caller went away"
    except NotLeader as error:
        if error.leader is not None:
            context.set_trailing_metadata(((LEADER_KEY, error.leader),))
        status = grpc.StatusCode.FAILED_PRECONDITION, _one_line(error)
    except Busy as error:
        status = grpc.StatusCode.ALREADY_EXISTS, _one_line(error)
    except NoUpstream as error:
        status = grpc.StatusCode.OUT_OF_RANGE, _one_line(error)
    except OldTerm as error:
        status = grpc.StatusCode.ABORTED, _one_line(error)
    except ConnectionError as error:
        status = grpc.StatusCode.UNAVAILABLE, _one_line(error)
    except NotHere as error:
        status = grpc.StatusCode.NOT_FOUND, _one_line(error)
    except ValueError as error:
        status = grpc.StatusCode.INVALID_ARGUMENT, _one_line(error)
    except Exception:
        _LOG.exception("%s from %s failed", name, context.peer())
        status = grpc.StatusCode.INTERNAL, f"internal error in {name}"
    context.abort(*status)


def _one_line(error: Exception) -> str:
    # It travels in HTTP/2 trailers, which have room for 8 KiB.
    return " ".join(str(error).split())[:2000]
