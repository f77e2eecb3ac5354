"""Removes unneeded state, periodically and on request.

- Pieces that learners left on the servers. What a learner had sent in whole is dropped
  with the commit after; of one that was killed while it sent, the coordinator was never
  told, so the servers are asked what they have.
- Entries of the log from before the oldest checkpoint that is kept (snapshots.py).
- The blocks of a job that is done, once no learner is there. They are in its newest
  checkpoint, from which they are loaded again for a learner that returns. Blocks with
  copies stay, since servers that come and go move them.
"""

from collections.abc import Mapping
from typing import Any

from ..wire.sums import is_sum
from .commits import Key
from .history import make_history
from .job import Job
from .restoring import usable
from .snapshots import snapshot_of

CLEAN_SECONDS = 60.0


class Cleaner:
    """Cleans up after one job; called by the job's thread."""

    def __init__(self, job: Job):
        self._job = job
        self._due = job.now() + CLEAN_SECONDS
        self._compacted: int | None = None  # the newest checkpoint at that time

    def clean_if_due(self) -> None:
        """Removes what is left over, at most once a minute, and says what."""
        if self._job.now() >= self._due:
            self._clean(dry_run=False)

    def clean(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Removes what is left over now; with `dry_run` it only says what."""
        return {"found": self._clean(dry_run=bool(message.get("dry_run")))}

    def _clean(self, dry_run: bool) -> list[str]:
        """Returns a line about each kind of thing that there was to remove."""
        job, found = self._job, []
        if not dry_run:
            self._due = job.now() + CLEAN_SECONDS
        if not job.is_initialized:
            return found
        for clean in (self._staged, self._log, self._blocks):
            try:
                line = clean(dry_run)
            except ValueError as error:  # the job goes on as before
                line = f"not everything was removed: {error}"
            if line is not None:
                found.append(line)
                if not dry_run:
                    job.around.say(f"{job.spec.job}: {line}", "cleaned")
        return found

    def _staged(self, dry_run: bool) -> str | None:
        job = self._job
        if not job.is_held:
            return None
        keys = left_over(job, job.servers.all("Status", {}))
        if not keys:
            return None
        # All rounds: a learner that was only paused may still send pieces.
        # A merger goes on: just the sums that did not come to count.
        sums = sorted(key for key in keys if is_sum(key[0]))
        dead = sorted({key[:2] for key in keys if not is_sum(key[0])})
        names = [f"{n} (incarnation {i})" for n, i in dead]
        who = ", ".join([*names, *(f"a merger in round {n}" for *_, n in sums)])
        what, of = f"{len(keys)} staged contributions", "of learners that left"
        if dry_run:
            return f"would remove {what} {of}: {who}"
        gone = [*([*owner, None] for owner in dead), *map(list, sums)]
        answers = job.servers.all("Drop", {"contributions": gone})
        nbytes = sum(answer["bytes"] for answer in answers)
        return f"removed {what} ({nbytes} bytes) {of}: {who}"

    def _log(self, dry_run: bool) -> str | None:
        job = self._job
        if self._compacted == job.saved:
            return None
        self._compacted = None if dry_run else job.saved
        log, name = job.around.log, job.spec.job
        history = make_history(log.read(name))
        kept = usable(job, history)[: job.around.settings.keep_checkpoints]
        done = 0 if history.snapshot is None else history.snapshot["version"]
        if not kept or kept[-1].version <= done:
            return None
        snapshot = snapshot_of(job, history, kept[-1])
        if snapshot is None:
            return None
        count, nbytes = log.size(name, snapshot.seq)
        what = f"{count} entries ({nbytes} bytes) of the log: version "
        what += f"{kept[-1].version}, the oldest checkpoint, has what they led to"
        if dry_run:
            return f"would remove {what}"
        job.files.make_durable(history)
        log.compact(name, snapshot)
        return f"removed {what}"

    def _blocks(self, dry_run: bool) -> str | None:
        job = self._job
        is_over = job.is_finished and not len(job.members)
        if job.spec.copies > 1 or not is_over or not job.is_held:
            return None
        if job.saved != job.engine.version:
            return None
        held = job.servers.all("Status", {})
        blocks, nbytes = (sum(part[x] for part in held) for x in ("blocks", "bytes"))
        what = f"{blocks} blocks ({nbytes} bytes) from the memory of servers: the job "
        what += f"is done, and its parameters are in {job.checkpoints.folder}"
        if dry_run:
            return f"would remove {what}/{job.saved}"
        job.servers.all("Forget", {})
        job.is_held = False
        return f"removed {what}/{job.saved}"


def left_over(job: Job, answers: list[dict[str, Any]]) -> set[Key]:
    """Returns the staged contributions of dead incarnations that nobody waits for.

    An incarnation of which any contribution may still be committed is left alone.
    """
    staged = {tuple(key) for answer in answers for key in answer["staged"]}
    wanted = {key[:2] for key in job.engine.kept}
    return {
        (learner, incarnation, round)
        for learner, incarnation, round in staged
        if is_sum(learner)
        and round <= job.engine.version
        or not is_sum(learner)
        and round > 0  # 0: the initial parameters
        and job.members.get(learner, incarnation) is None
        and (learner, incarnation) not in wanted
    }
