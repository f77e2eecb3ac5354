"""Runs learners that exchange parameters through a service, and the service.

A fleet is a coordinator (or several, of which one leads), servers, and learners. Each
learner is a job of its own with its own supervisor (supervisor.py), so that the death
of one is not felt by the others. This module supervises those supervisors, and the
processes of the service:

| what ended | what is restarted |
|---|---|
| the coordinator | the coordinator; its log says what has happened |
| one of several coordinators | the same; meanwhile another one leads |
| the coordinator, stopped or stuck | the same, after it was killed |
| a server of which others have copies | the server |
| another server, or the coordinator with 69 (it has lost one) | the whole service |
| the supervisor of a learner, with neither 0, 1 nor 2 | the learner |

The others continue without a learner that has given up. Bad input ends everything.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import exit_codes
from .exit_codes import BAD_INPUT, DONE, GAVE_UP, PREEMPTED, UNREACHABLE, Ending
from .fleet_parts import Commands, FleetLogs, Learner, Part
from .fleet_status import count, describe, last_commit, last_rows
from .logs import say
from .restarts import Decision, Restarts
from .stop_signals import StopSignals
from .workers import Heir

# In the run folder, written by the coordinator: of every job, and of one that is done.
SPEC, FINAL = "spec.json", "final.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """How a fleet is run; times are in seconds. See also settings.py.

    Attributes:
      processes: of each learner.
      grace_seconds: how long a learner may take to save and exit, and then the service.
      spare_seconds: how much longer we wait for a learner's supervisor, which kills
        what is left of its workers after `grace_seconds`.
      status_seconds: the time between two status lines.
      silent_seconds: how long the coordinator may send no heartbeat. One that is
        stopped keeps the lock of its log, so it must be killed before another starts.
    """

    processes: int = 1
    max_restarts: int = 5
    grace_seconds: float = 60.0
    spare_seconds: float = 5.0
    status_seconds: float = 30.0
    silent_seconds: float = 20.0
    repeat_seconds: float = 1.0
    first_delay: float = 1.0
    longest_delay: float = 30.0
    poll_seconds: float = 0.1


class Fleet:
    """Runs a fleet until its learners are done. Must run in the main thread.

    Args:
      make: returns what to run; called once the log folder is locked.
      run: the run folder. That of learner I is `learners/I` in it.
      folder: for logs.
    """

    def __init__(
        self,
        make: Callable[[], Commands],
        run: Path,
        folder: Path,
        settings: FleetSettings,
    ):
        self._make, self._run, self._settings = make, run, settings
        self._logs = FleetLogs(folder, is_single=settings.processes == 1)
        self._heir = Heir()
        self._signals = StopSignals(settings.repeat_seconds)
        self._told = self._signals.told
        self._restarts = self._make_restarts()  # of the service
        self._coordinators: list[Part] = []  # of which one leads
        self._servers: list[Part] = []
        self._learners: list[Learner] = []
        self._commit: int | None = None  # what the service must get beyond
        self._seen: int | None = None  # the newest commit
        self._status_at, self._status = 0.0, ""

    def run(self) -> int:
        """Returns the exit code; leaves no process behind."""
        with self._logs, self._heir, self._signals:
            self._make_parts()
            say(
                f"{count(len(self._learners), 'learner')} and "
                f"{count(len(self._servers), 'server')}, logs in "
                f"{self._logs.folder}"
            )
            try:
                return self._watch()
            finally:
                for part in (*self._learners, *self._service):
                    part.kill()

    def _make_parts(self) -> None:
        commands, logs, heir = self._make(), self._logs, self._heir
        coordinators = [commands.coordinator, *commands.standbys]
        # Who stands by does not beat, and takes over from one that is stuck.
        beat = None if commands.standbys else commands.beat
        self._coordinators = [
            Part(i, command, logs, heir, beat) for i, command in enumerate(coordinators)
        ]
        self._servers = [
            Part(i, command, logs, heir)
            for i, command in enumerate(commands.servers, start=len(coordinators))
        ]
        self._commit = self._seen = last_commit(self._run)
        for number, command in enumerate(commands.learners):
            folder = self._run / "learners" / str(number)
            restarts = self._make_restarts()
            self._learners.append(
                Learner(number, command, logs, heir, folder=folder, restarts=restarts)
            )

    def _make_restarts(self) -> Restarts:
        settings = self._settings
        return Restarts(
            1,
            least=1,
            limit=settings.max_restarts,
            first_delay=settings.first_delay,
            longest_delay=settings.longest_delay,
        )

    @property
    def _service(self) -> list[Part]:
        return [*self._coordinators, *self._servers]

    # While it runs.

    def _watch(self) -> int:
        self._status_at = time.monotonic() + self._settings.status_seconds
        while True:
            for part in (*self._service, *self._learners):
                part.start_if_due()
            self._look()
            if self._told:
                return self._stop()
            if (status := self._poll()) is not None:
                return status
            if all(learner.is_over for learner in self._learners):
                return self._finish()
            time.sleep(self._settings.poll_seconds)

    def _look(self) -> None:
        """Shows what everyone prints, and records progress."""
        self._logs.show()
        for learner in self._learners:
            learner.look()
        seconds = self._settings.silent_seconds
        for part in self._service:
            if part.kill_if_silent(seconds):
                say(f"{part.name} sent no heartbeat for {seconds:g} s; killing it")
        if (commit := last_commit(self._run)) is not None:
            if self._seen is not None and commit < self._seen:
                # The service went on from a checkpoint. Computing again is progress
                # if it gets further than the time before, not than ever.
                self._commit = self._seen
            self._seen = commit
            if self._commit is None or commit > self._commit:
                self._commit = commit
                self._restarts.progress()
        if time.monotonic() >= self._status_at:
            self._status_at = time.monotonic() + self._settings.status_seconds
            self._say_status()

    def _say_status(self) -> None:
        rows = last_rows(self._run)
        text = describe(self._learners, self._service, rows)
        if text != self._status:
            self._status = text
            self._logs.event("status", text=text)
            say(text)

    def _poll(self) -> int | None:
        """Acts on what has ended; returns the exit code if that ends everything."""
        for part in self._service:
            if ending := part.poll():
                status = self._after_service(part, ending)
                if status is not None:
                    return status
        for learner in self._learners:
            if ending := learner.poll():
                status = self._after_learner(learner, ending)
                if status is not None:
                    return status
        return None

    def _after_service(self, part: Part, ending: Ending) -> int | None:
        # One of several may have been deposed; a server that has died is seen here.
        is_alone = part in self._coordinators or self._has_copies()
        if len(self._coordinators) == 1 and ending.status == UNREACHABLE:
            is_alone = False
        restarting = "restarting it" if is_alone else "restarting the service"
        decision = self._decide(part, ending, self._restarts, restarting)
        if decision.status is not None:
            return self._fail(decision.status)
        for other in [part] if is_alone else self._service:
            other.kill()
            other.due = time.monotonic() + decision.delay
        return None

    def _has_copies(self) -> bool:
        """Returns whether the job keeps several copies of each block on the servers."""
        file = self._run / SPEC
        return file.exists() and json.loads(file.read_text()).get("copies", 1) > 1

    def _after_learner(self, learner: Learner, ending: Ending) -> int | None:
        if ending.status == DONE:
            learner.is_over = True
            self._logs.event("done", name=learner.name)
            return None
        if ending.status != GAVE_UP:
            decision = self._decide(learner, ending, learner.restarts, "restarting it")
            if decision.status == BAD_INPUT:
                return self._fail(BAD_INPUT)
            if decision.status is None:
                learner.due = time.monotonic() + decision.delay
                return None
        learner.is_over = True
        return self._after_giving_up(learner)

    def _after_giving_up(self, learner: Learner) -> int | None:
        """Continues with the other learners, if they can do without this one."""
        line = learner.last_line()
        self._logs.event("gave up", name=learner.name, reason=line)
        if learner.highest is None and self._commit is None:
            say(
                f"{learner.name} gave up before its first step, which the others wait "
                f"for, saying {line!r}; stopping"
            )
            return self._fail(GAVE_UP)
        say(f"{learner.name} gave up; the others continue without it")
        return None

    def _decide(
        self, part: Part, ending: Ending, restarts: Restarts, restarting: str
    ) -> Decision:
        """Decides what follows a death, and reports it."""
        fields = {"name": part.name, "attempt": part.starts, "reason": str(ending)}
        self._logs.event("death", **fields)
        decision = restarts.after(ending, restarting)
        saying = ""
        if ending.status == BAD_INPUT:
            saying = f", saying {part.last_line()!r}"
        say(f"{ending}{saying}; {decision.message}")
        if decision.status is not None:
            self._logs.event("failed", status=decision.status, **fields)
        else:
            self._logs.event("restart", delay=decision.delay, **fields)
        return decision

    # At the end.

    def _fail(self, status: int) -> int:
        """Ends everything; who has done a step may save it first."""
        if any(learner.highest is not None for learner in self._learners):
            self._end_all()
        return status

    def _finish(self) -> int:
        """Ends the service after its last learner; returns the exit code."""
        deadline = time.monotonic() + self._settings.grace_seconds
        is_done = all(learner.status == DONE for learner in self._learners)
        final = self._run / FINAL
        while is_done and not final.exists() and time.monotonic() < deadline:
            if self._told or self._poll() is not None:
                break
            for part in self._service:
                part.start_if_due()
            self._logs.show()
            time.sleep(self._settings.poll_seconds)
        self._end_all()
        if is_done and final.exists():
            self._logs.event("finished", status=DONE)
            say("done: every learner is done")
            return DONE
        reason = "some learners gave up; the others are done"
        if is_done:
            reason = f"every learner is done, but the service did not write {final}"
        self._logs.event("finished", status=GAVE_UP, reason=reason)
        say(reason)
        return GAVE_UP

    def _stop(self) -> int:
        """Lets everyone save and exit; a second signal kills them at once."""
        name = exit_codes.signal_name(self._told[0])
        say(
            f"{name}: asking the learners and then the service to save and exit, each "
            f"within {self._settings.grace_seconds:g} s; a second signal kills them"
        )
        self._end_all()
        learners = [_last_status(part) for part in self._learners]
        status = exit_codes.after_stop(learners, self._told[0])
        if status == PREEMPTED:  # what the learners saved is of use with the service's
            everyone = [*learners, *map(_last_status, self._coordinators)]
            status = exit_codes.after_stop(everyone, self._told[0])
        self._logs.event("stop", signal=self._told[0], status=status)
        message = "not everyone saved; the run continues from the last checkpoint"
        if status == PREEMPTED:
            message = "every learner and the service saved and exited"
        elif status == DONE:
            message = "every learner is done"
        say(f"stopped: {message}")
        return status

    def _end_all(self) -> None:
        """Ends the learners, then who coordinates, and saves, then the servers."""
        seconds = self._settings.grace_seconds
        self._end(self._learners, seconds + self._settings.spare_seconds)
        self._end(self._coordinators, seconds)
        self._end(self._servers, seconds)

    def _end(self, parts: Sequence[Part], seconds: float) -> None:
        for part in parts:
            part.ask_to_end()
        deadline = time.monotonic() + seconds
        while any(part.is_running for part in parts):
            for part in parts:
                part.poll()
            self._logs.show()
            if len(self._told) > 1 or time.monotonic() > deadline:
                break
            time.sleep(self._settings.poll_seconds)
        for part in parts:
            part.kill()


def _last_status(part: Part) -> int:
    """Returns how a part ended; one that was never started did not save anything."""
    return GAVE_UP if part.status is None else part.status
