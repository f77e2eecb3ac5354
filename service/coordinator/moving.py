"""Moves blocks between the servers of a job while the training goes on.

Blocks are copied a few at a time, between two commits, and from then on the new server
takes part in every commit of them. So nothing has to be caught up with, and a commit
waits for one slice at most.
"""

from ..blocks import hashing
from .job import Job
from .servers import ServerLost

SLICE_BYTES = 16 << 20  # to each server, between two commits


class Moving:
    """Brings the blocks of one job to where they belong; for the thread of the job."""

    def __init__(self, job: Job):
        self._job = job
        self._epoch = -1  # of what follows
        self._todo: dict[str, list[int]] = {}  # by server
        self._num_moved, self._began = 0, 0.0
        self._failure, self._num_failures = "", 0  # of the last attempts

    @property
    def is_busy(self) -> bool:
        """Whether there is more to move at once."""
        return any(self._todo.values()) and not self._failure

    def step(self) -> None:
        """Takes in servers that have come, or moves some blocks."""
        job, servers = self._job, self._job.servers
        if servers.placement.copies == 1 or not job.is_initialized:
            return
        try:
            if not servers.placement.is_settled:
                self._move_some()
                return
            self._todo = {}  # of a placement that may have ended otherwise
            if servers.newcomers:
                self._take_in()
            else:
                self._let_go()
        except ServerLost as error:
            servers.lose(error)

    def _take_in(self) -> None:
        """Makes servers that have come members, if that gives them any block."""
        job, servers = self._job, self._job.servers
        placement, new = servers.placement, servers.newcomers
        layout, name = job.spec.layout, job.spec.job
        members = (*placement.members, *new)
        after = hashing.holders(layout, name, members, placement.copies)
        busy = {server for names in after.values() for server in names}
        if not (new := [server for server in new if server in busy]):
            return
        # What it may hold is of an earlier time.
        about = {"spec": job.spec.message, "blocks": [], "newest": job.engine.version}
        for method, message in (("Forget", {}), ("Create", about)):
            servers.each(method, dict.fromkeys(new, message))
        changed = placement.with_members((*placement.members, *new))
        servers.change(changed, f"servers that have come: {', '.join(new)}")

    def _let_go(self) -> None:
        """Moves away the blocks of servers that ask to leave, if others are there."""
        servers = self._job.servers
        placement = servers.placement
        leaving = sorted(servers.leaving & {*placement.members})
        rest = tuple(name for name in placement.members if name not in leaving)
        if leaving and rest:
            why = f"servers that ask to leave: {', '.join(leaving)}"
            servers.change(placement.with_members(rest), why)

    def _plan(self) -> None:
        """Lists the blocks that each server lacks."""
        servers = self._job.servers
        placement = servers.placement
        if self._epoch != placement.epoch:
            self._epoch, self._todo = placement.epoch, {}
            if not self._num_moved:
                self._began = self._job.now()
            if not placement.members:
                return
            layout, name = self._job.spec.layout, self._job.spec.job
            after = hashing.holders(layout, name, placement.members, placement.copies)
            for block, names in after.items():
                for server in names:
                    if block not in servers.held.get(server, ()):
                        self._todo.setdefault(server, []).append(block)

    def _move_some(self) -> None:
        self._plan()
        job, servers = self._job, self._job.servers
        messages = {name: self._slice(name) for name, x in self._todo.items() if x}
        if not messages:
            self._settle()
            return
        answers, failure = servers.each("Fetch", messages), ""
        for name, answer in zip(messages, answers, strict=True):
            arrived = set(answer["arrived"])
            servers.held.setdefault(name, set()).update(arrived)
            self._num_moved += len(arrived)
            self._todo[name] = [b for b in self._todo[name] if b not in arrived]
            failure = answer["failed"] or failure
        # Perhaps the other server is lost, of which we hear soon.
        if failure and failure != self._failure:
            job.around.say(f"{job.spec.job}: {failure}; keeps trying")
        self._failure = failure
        self._num_failures = self._num_failures + 1 if failure else 0

    def _slice(self, name: str) -> dict[str, object]:
        """Returns the order to a server to fetch some of the blocks that it lacks."""
        servers, layout = self._job.servers, self._job.spec.layout
        source, blocks, nbytes = "", [], 0
        for block in self._todo[name]:
            if not source:
                holders = sorted(n for n, x in servers.held.items() if block in x)
                # Where the first one did not send, perhaps the next one does.
                source = holders[self._num_failures % len(holders)]
            if block not in servers.held[source]:
                continue
            nbytes += layout.block_bytes(block)
            if blocks and nbytes > SLICE_BYTES:
                break
            blocks.append(block)
        about = {"source": servers.address(source), "blocks": blocks}
        return {**about, "version": self._job.engine.version}

    def _settle(self) -> None:
        job, servers = self._job, self._job.servers
        servers.change(servers.placement.settled(), "all blocks are where they belong")
        total = len(job.spec.layout.blocks) * servers.placement.copies
        seconds = job.now() - self._began
        text = (
            f"{job.spec.job}: moved {self._num_moved} of {total} copies of blocks in "
        )
        about = {"copies": self._num_moved, "seconds": round(seconds, 3)}
        job.around.say(f"{text}{seconds:.1f} s", "moved", **about)
        self._num_moved = 0
