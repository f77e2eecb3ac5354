"""A merger: answers learners like a service, and passes their calls on.

Learners stay members of the coordinator, with their own leases, data and weights. Only
tensors end here: the contributions of a round are added up, and one sum goes on; and
each version is pulled once for all. What is above may be a merger too.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..blocks.box import Box
from ..blocks.layout import Layout
from ..blocks.placement import Placement
from ..rounds.policy import Policy
from ..server.receiving import Receiving
from ..wire import codecs, tensors
from ..wire.calls import Channel, Download, Message, Server, Upload
from ..wire.coordinators import Caller, reach
from ..wire.credentials import Tls
from ..wire.errors import Busy, NoUpstream, Refused, Unavailable
from ..wire.messages import decode
from ..wire.sums import check_counts_all
from .job import MergedJob
from .upstream import Upstream

CALL_SECONDS = 20.0
PASSED_ON = ("Report", "Save", "Status")


class Merger:
    """The jobs of one merger.

    Attributes:
      methods, streams: what it answers.

    Args:
      caller: of what is above.
      connect: makes a channel to a server, given its address.
      clock: monotonic.
    """

    def __init__(
        self,
        caller: Caller,
        connect: Callable[[str], Channel],
        version: str,
        clock: Callable[[], float],
    ):
        self._caller, self._connect = caller, connect
        self._version, self._clock = version, clock
        self.address = ""  # under which learners reach it; known once it is bound
        # One that was restarted has lost what was sent to it, and says so by this.
        self._place = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._jobs: dict[str, MergedJob] = {}
        self.methods: dict[str, Callable[[Message], Message]] = {
            "OpenJob": self.open_job,
            "Initialized": self.initialized,
            "Join": self.join,
            "Alive": self.alive,
            "Next": self.next,
            "Contribute": self.contribute,
            "ContributeSum": self.contribute,
            "Leave": self.leave,
            **{name: self._passing(name) for name in PASSED_ON},
        }
        self.streams = {"Push": Upload(self.push), "Pull": Download(self.pull)}

    def open_job(self, message: Message) -> Message:
        """Opens a job above; its learners send to this merger then."""
        if message.get("version") != self._version:
            raise Refused(
                f"job {message.get('job')!r}: the learner runs meshloom "
                f"{message.get('version')}, the merger {self._version}. Install the "
                "same version on both."
            )
        try:
            policy = Policy.from_json(message["policy"])
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"job {message.get('job')!r}: policy: {error}") from error
        check_counts_all(str(message.get("job")), policy)
        if not (pull := codecs.of_job(message, "pull")).is_plain:
            raise Refused(
                f"job {message.get('job')!r}: a merger sends whole versions, and the "
                f"job asks for changes ({pull}). Set exchange.pull='{codecs.PLAIN}', "
                "or let the learners use the service itself"
            )
        if message.get("copies", 1) != 1:
            raise Refused(
                f"job {message.get('job')!r}: a merger does not follow blocks that "
                f"move, and the job asks for {message['copies']} copies. Set "
                "exchange.copies=1, or let the learners use the service itself"
            )
        if message.get("tables"):
            raise Refused(
                f"job {message.get('job')!r} has tables, whose rows a merger does not "
                "add up; let the learners use the service itself"
            )
        # The rest is checked above, before anything is made of it.
        opened = self._above("OpenJob", message, CALL_SECONDS)
        name = message["job"]
        with self._lock:
            if name not in self._jobs:
                self._jobs[name] = MergedJob(
                    message, lambda layout: self._upstream(message, layout), self._clock
                )
            job = self._jobs[name]
        job.opened(opened)
        return {**opened, **self._described(), "place": self._place}

    def initialized(self, message: Message) -> Message:
        """Passes on the initial parameters, if they were sent here."""
        job, learner = self._job(message), message.get("learner")
        if type(learner) is int:
            self._reaching(lambda: job.initialize(learner))
        return self._above("Initialized", message, CALL_SECONDS)

    def join(self, message: Message) -> Message:
        answer = self._above("Join", message, CALL_SECONDS)
        job = self._job(message)
        job.joined(message["learner"], answer)
        # The servers are those of this merger, as OpenJob has told.
        return {**answer, **self._described()}

    def _described(self) -> Message:
        """Returns that all blocks are here, as a coordinator says where they are."""
        here = (self.address,)
        placement = Placement(copies=1, before=here, members=here).to_json()
        return {"servers": {self.address: self.address}, "placement": placement}

    def alive(self, message: Message) -> Message:
        self._hear(message)
        try:
            return self._above("Alive", message, CALL_SECONDS)
        except Refused:
            self._leave(message)
            raise

    def next(self, message: Message) -> Message:
        self._hear(message)
        answer = self._above("Next", message, 2 * CALL_SECONDS)
        if (job := self._find(message)) is not None:
            job.hear(message["learner"], message["incarnation"])
            job.told(message["learner"], message["incarnation"], answer)
        return answer

    def contribute(self, message: Message) -> Message:
        """Takes a contribution, or a sum of some, that was sent to this process."""
        job = self._find(message)
        if job is None or message.get("place") != self._place:
            return {"state": "elsewhere"}
        return job.contribute(message)

    def leave(self, message: Message) -> Message:
        self._leave(message)
        return self._above("Leave", message, CALL_SECONDS)

    def push(self, messages: Iterator[bytes]) -> Message:
        """Receives pieces of a contribution, after a message that says whose."""
        about = decode(next(messages, b""))
        names = ("job", "learner", "incarnation", "round")
        if any(name not in about for name in names):
            raise Refused(f"push: expected a message with {', '.join(names)} first")
        key = about["learner"], about["incarnation"], about["round"]
        receiving = Receiving(self._job(about), key)
        try:
            nbytes = tensors.decode(
                messages, ("block", "slab"), receiving.target, receiving.done
            )
        finally:
            receiving.close()
        return {"bytes": nbytes}

    def pull(self, message: Message) -> Iterator[bytes]:
        """Sends boxes of a version."""
        job, version = self._job(message), message.get("version")
        if type(version) is not int or not isinstance(message.get("boxes"), list):
            raise Refused(f"pull: version is {version!r}, expected one, and boxes")
        boxes = [(x, Box(tuple(a), tuple(b))) for x, a, b in message["boxes"]]
        return tensors.encode(self._reaching(lambda: job.read(version, boxes)))

    def is_over(self) -> bool:
        """Whether there were learners, and none is left."""
        with self._lock:
            jobs = list(self._jobs.values())
        return bool(jobs) and all(job.is_over() for job in jobs)

    def close(self) -> None:
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.close()
        self._caller.close()

    def _upstream(self, spec: Message, layout: Layout) -> Upstream:
        return Upstream(self._caller, self._connect, spec, layout)

    def _above(self, name: str, message: Message, seconds: float) -> Message:
        return self._reaching(lambda: self._caller.call(name, message, seconds))

    def _passing(self, name: str) -> Callable[[Message], Message]:
        return lambda message: self._above(name, message, CALL_SECONDS)

    def _reaching(self, call: Callable[[], Any]) -> Any:
        """Returns what a call of something above returns.

        If that is away, learners should ask this merger again, and nobody else.
        """
        try:
            return call()
        except Busy:
            raise
        except Unavailable as error:
            raise NoUpstream(f"the merger {self.address} waits: {error}") from error

    def _hear(self, message: Message) -> None:
        if (job := self._find(message)) is not None:
            learner, incarnation = message.get("learner"), message.get("incarnation")
            if type(learner) is int and type(incarnation) is int and incarnation > 0:
                job.hear(learner, incarnation)

    def _leave(self, message: Message) -> None:
        if (job := self._find(message)) is not None:
            job.leave(message.get("learner", -1), message.get("incarnation", -1))

    def _find(self, message: Message) -> MergedJob | None:
        with self._lock:
            return self._jobs.get(message.get("job", ""))

    def _job(self, message: Message) -> MergedJob:
        if (job := self._find(message)) is not None:
            return job
        # A merger that was restarted: the learner opens the job, and sends again.
        raise Unavailable(f"merger {self.address}: job {message.get('job')!r} is new")


class MergerProcess:
    """Answers calls until closed.

    Attributes:
      address: under which learners reach it.
    """

    def __init__(
        self,
        bind: str,
        upstream: str,
        *,
        version: str,
        clock: Callable[[], float],
        token: str | None = None,
        tls: Tls | None = None,
    ):
        """Args:
        upstream: address of a coordinator or merger; of several with commas between.
        """
        caller = reach(upstream, token, tls)
        self.merger = Merger(
            caller, lambda address: Channel(address, token, tls), version, clock
        )
        methods, streams = self.merger.methods, self.merger.streams
        try:
            self._server = Server(bind, methods, streams, token, tls)
        except BaseException:
            caller.close()
            raise
        self.address = f"{bind.rpartition(':')[0]}:{self._server.port}"
        self.merger.address = self.address

    def close(self) -> None:
        self.merger.close()
        self._server.close()
