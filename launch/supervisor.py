"""Runs the processes of a job, wherever they are, and restarts them when they die.

It is a process of its own, so it survives whatever kills a jax process, process 0
included. See exit_codes.py for exit codes, progress_file.py for what counts as
progress, and restarts.py for when a group shrinks or is given up.
"""

import dataclasses
import time
from pathlib import Path

from . import exit_codes, progress_file
from .exit_codes import BAD_INPUT, DONE, PREEMPTED, UNREACHABLE, Ending
from .logs import Logs, last_line, say
from .masking import masked_command
from .progress_watch import Watch
from .restarts import Restarts
from .settings import Settings
from .stop_signals import StopSignals
from .target import Attempt, Launcher
from .warm import Warm
from .workers import Group, Heir

# A worker's own watchdog fires first: it can dump the stacks of its threads.
SLACK = 1.5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended: "done", "stop", "resize", "death" or "stall"."""

    kind: str
    reason: str = ""
    death: Ending | None = None
    endings: tuple[Ending, ...] = ()  # of all workers, once they have ended


class Supervisor:
    """Runs the processes of one job on a target until the job is done.

    Must run in the main thread: it handles signals, and the kernel kills the workers
    when the thread that started them ends.
    """

    def __init__(self, target: Launcher, folder: Path, settings: Settings):
        self._target, self._settings = target, settings
        self._logs = Logs(folder)
        self._heir = Heir()
        self._warm = Warm(target.warm, self._logs, lambda: bool(self._told))
        self._watch = Watch(
            stall_seconds=settings.stall_seconds,
            start_seconds=settings.start_seconds,
            slack=SLACK,
        )
        self._restarts = Restarts(
            settings.processes,
            least=settings.min_processes or settings.processes,
            limit=settings.max_restarts,
            first_delay=settings.first_delay,
            longest_delay=settings.longest_delay,
        )
        self._attempt = 0
        self._reason = ""  # why the previous attempt ended
        self._signals = StopSignals(settings.repeat_seconds)
        self._told = self._signals.told
        self._said: set[str] = set()  # messages that are shown only once

    def run(self) -> int:
        """Returns the exit code; leaves no process behind."""
        with self._logs, self._heir, self._warm, self._signals:
            self._logs.write_size(self._restarts.size)
            say(f"{_processes(self._restarts.size)}, logs in {self._logs.folder}")
            status = None
            while status is None:
                outcome = self._run_attempt()
                self._reason = outcome.reason
                status = self._after(outcome)
            return status

    # One attempt.

    def _run_attempt(self) -> Outcome:
        settings, logs = self._settings, self._logs
        if self._told:
            return Outcome("stop")
        if (size := self._asked_size()) is not None:
            before = self._restarts.size
            self._restarts.resize(size)
            self._resized(before, "requested by the user")
        self._attempt += 1
        size = self._restarts.size
        attempt = Attempt(self._attempt, size, settings.processes, self._reason)
        self._watch.begin()
        self._restarts.begin()
        group = Group(self._heir, self._warm, logs, size)
        try:
            for number in range(size):
                logs.progress(number).unlink(missing_ok=True)  # of an earlier attempt
            commands = self._target.start(attempt, logs)
            names = [c.name for c in commands] + [f"worker {n}" for n in range(size)]
            for name in dict.fromkeys(names):
                logs.note(name, f"attempt {self._attempt}, {_processes(size)}")
            group.start(commands)
            logs.event(
                "start",
                attempt=self._attempt,
                processes=size,
                coordinator=commands[0].env.get("MESHLOOM_COORDINATOR"),
                pids=[worker.pid for worker in group.workers],
                command=masked_command(self._target.command),
            )
            outcome = self._watch_group(group)
        finally:
            group.kill()
        endings = group.endings(self._watch.reports)
        for worker, ending in zip(group.workers, endings, strict=True):
            by_us = f", stopped by the supervisor: {outcome.reason}"
            text = f"attempt {self._attempt}: {ending}{by_us * worker.was_told}"
            logs.note(worker.name, text)
        return dataclasses.replace(outcome, endings=tuple(endings))

    def _watch_group(self, group: Group) -> Outcome:
        """Returns why the attempt ended; some workers may still have to be killed."""
        settings, watch = self._settings, self._watch
        while True:
            group.poll()
            self._look()  # after polling, so that the last reports of the dead count
            if self._told:
                return self._stop(group)
            if death := exit_codes.cause(group.endings(watch.reports)):
                self._logs.event("death", attempt=self._attempt, **_fields(death))
                if death.status == PREEMPTED:
                    # The others are exiting too, and a second SIGTERM would end them
                    # before they have saved.
                    self._wait(group, settings.grace_seconds)
                else:
                    self._end(group, settings.end_seconds)
                return Outcome("death", str(death), death)
            if group.has_ended:
                return Outcome("done")
            if watch.has_stalled:
                reason, fields = watch.message(), {"attempt": self._attempt}
                self._logs.event("stall", **fields, step=watch.step, reason=reason)
                self._end(group, settings.end_seconds)
                return Outcome("stall", reason)
            if (size := self._asked_size()) is not None:
                reason = f"told to continue with {_processes(size)}"
                say(f"{reason}: asking the workers to save and exit")
                self._end(group, settings.grace_seconds)
                return Outcome("resize", reason)
            time.sleep(settings.poll_seconds)

    def _look(self) -> None:
        """Reads the workers' reports, and shows what they print."""
        self._logs.show()
        for number in range(self._restarts.size):
            try:
                report = progress_file.read(self._logs.progress(number))
            except ValueError as error:
                self._say_once(str(error))
                continue
            if self._watch.see(number, report):
                self._restarts.progress()
        if self._watch.only_checks_liveness:
            self._say_once("the workers report no progress: only deaths are noticed")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._logs.event("note", text=text)
            say(text)

    def _end(self, group: Group, seconds: float) -> None:
        """Asks all workers to exit, and waits for them."""
        for worker in group.workers:
            worker.ask_to_end()
        self._wait(group, seconds)

    def _wait(self, group: Group, seconds: float) -> None:
        """Waits up to `seconds` for all workers; the caller kills the rest.

        Cuts the wait short if one dies meanwhile: the others cannot save without it.
        """
        deadline = time.monotonic() + seconds
        while not group.poll() and time.monotonic() < deadline:
            if len(self._told) > 1:
                break
            death = exit_codes.cause(group.endings(self._watch.reports))
            if death is not None and death.status != PREEMPTED:
                last = time.monotonic() + self._settings.end_seconds
                deadline = min(deadline, last)
            self._look()
            time.sleep(self._settings.poll_seconds)

    def _stop(self, group: Group) -> Outcome:
        """Lets the workers save and exit; a second signal kills them at once."""
        seconds = self._settings.grace_seconds
        name = exit_codes.signal_name(self._told[0])
        say(
            f"{name}: asking the workers to save and exit within {seconds:g} s; a "
            "second signal kills them"
        )
        self._end(group, seconds)
        return Outcome("stop", f"told to stop by {name}")

    # Between attempts.

    def _after(self, outcome: Outcome) -> int | None:
        """Returns the exit code, or None for another attempt."""
        if outcome.kind == "done":
            self._logs.event("done", attempt=self._attempt)
            say(f"done at attempt {self._attempt}")
            return DONE
        if self._told:
            return self._stopped(outcome)
        if outcome.kind == "resize":
            return None
        return self._decide(outcome)

    def _decide(self, outcome: Outcome) -> int | None:
        size = self._restarts.size
        decision = self._restarts.after(outcome.death)
        if outcome.death is not None and outcome.death.status == UNREACHABLE:
            self._watch.fall_back()
        said = ""
        if outcome.death is not None and outcome.death.status == BAD_INPUT:
            said = f", saying {self._last_line(outcome.death)!r}"
        say(f"attempt {self._attempt}: {outcome.reason}{said}; {decision.message}")
        if decision.status is not None:
            self._logs.event("failed", status=decision.status, reason=decision.message)
            return decision.status
        if self._restarts.size != size:
            self._resized(size, decision.message)
        self._logs.event(
            "restart",
            attempt=self._attempt + 1,
            processes=self._restarts.size,
            delay=decision.delay,
            reason=outcome.reason,
        )
        deadline = time.monotonic() + decision.delay
        while time.monotonic() < deadline and not self._told:
            time.sleep(self._settings.poll_seconds)
        return None

    def _last_line(self, death: Ending) -> str:
        """Returns a worker's last line, or that of any process it has started."""
        logs = [self._logs.worker(n) for n in range(self._restarts.size)]
        own = self._logs.of(death.name)
        lines = [last_line(log) for log in ([own] if own in logs else [*logs, own])]
        errors = [line for line in lines if line.startswith("meshloom: ")]
        return (errors or lines)[0]

    def _asked_size(self) -> int | None:
        """Returns the number of processes that the user requested, if possible."""
        size, most = self._logs.told_size(self._restarts.size), self._target.most
        if size is not None and most is not None and size > most:
            self._logs.write_size(self._restarts.size)
            say(f"{size} processes were requested, but the hosts have room for {most}")
            return None
        return size

    def _stopped(self, outcome: Outcome) -> int:
        ends = [ending.status for ending in outcome.endings]
        status = exit_codes.after_stop(ends, self._told[0])
        self._logs.event("stop", signal=self._told[0], status=status)
        message = "not every worker saved; the job continues from the last checkpoint"
        if status == PREEMPTED:
            message = "every worker saved and exited"
        elif status == DONE:
            message = "every worker is done"
        say(f"stopped: {message}")
        return status

    def _resized(self, before: int, reason: str) -> None:
        size = self._restarts.size
        self._logs.write_size(size)
        self._logs.event("resize", processes=size, before=before, reason=reason)


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number != 1)}"


def _fields(death: Ending) -> dict[str, int | str | None]:
    ended = "signal" if death.status < 0 else "status"
    return {
        "worker": death.worker,
        ended: abs(death.status),
        "step": death.step,
        "reason": str(death),
    }
