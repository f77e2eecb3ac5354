"""Removes from the servers what nobody will commit: pieces of learners that are dead.

What a learner had sent in whole is dropped with the commit after. A learner that is
killed while it sends leaves pieces of which the coordinator was never told: the servers
are asked what they have, every now and then.
"""

from typing import Any

from ..wire.errors import Refused
from ..wire.sums import is_sum
from .commits import Key
from .job import Job

CLEAN_SECONDS = 60.0


class Cleaner:
    """Cleans up after the learners of one job; called by the job's thread."""

    def __init__(self, job: Job):
        self._job = job
        self._due = job.now() + CLEAN_SECONDS

    def clean_if_due(self) -> None:
        """Removes what is left over, at most once a minute, and says what."""
        job = self._job
        if job.now() < self._due or not job.is_initialized:
            return
        self._due = job.now() + CLEAN_SECONDS
        keys = left_over(job, job.servers.all("Status", {}))
        if not keys:
            return
        # All rounds: a learner that was only paused may still send pieces. A merger
        # goes on: just the sums that did not come to count.
        sums = sorted(key for key in keys if is_sum(key[0]))
        dead = sorted({key[:2] for key in keys if not is_sum(key[0])})
        gone = [*([*owner, None] for owner in dead), *map(list, sums)]
        message = {"contributions": gone}
        try:
            answers = job.servers.all("Drop", message)
        except Refused as error:
            job.around.say(f"{job.spec.job}: staged contributions not removed: {error}")
            return
        nbytes = sum(answer["bytes"] for answer in answers)
        who = [f"{n} (incarnation {i})" for n, i in dead]
        who += [f"a merger in round {round}" for *_, round in sums]
        job.around.say(
            f"{job.spec.job}: removed {len(keys)} staged contributions ({nbytes} "
            f"bytes) of learners that left: {', '.join(who)}"
        )


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
