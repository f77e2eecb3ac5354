"""The coordinator: the calls that servers and learners make, for several jobs.

Handlers look a job up under the coordinator's lock, let go of it, and then ask the
job's own thread (driver.py) or wait at its board.
"""

import functools
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..wire.errors import Refused, Unavailable
from . import disk, requests, status
from .driver import Driver, moving
from .history import make_history
from .job import Job
from .log import Log
from .registry import Registered, Registry
from .servers import RemoteServer, ServerGroup
from .settings import Say, Settings, Surroundings
from .spec import JobSpec, check_same, parse_spec

Message = dict[str, Any]

# A learner waits for the answer to a call at least this long.
ANSWER_SECONDS = 15.0
CLEAN_SECONDS = 120.0  # one job may be cleaned for so long
# What the thread of a job is asked: {call: method}.
ASKED = {"Join": "join", "Leave": "leave", "Report": "report"}
ASKED |= {"Initialized": "initialize", "Save": "save_now"}
POLL_SECONDS = 20.0  # at most, of a learner that waits for its turn


class Coordinator:
    """All jobs of one folder.

    Args:
      num_servers: jobs are opened once so many servers have registered.
      version: of this package; learners must have the same.
      connect: makes a server that can be called, from its name and address.
      log: of a coordinator that leads; by default the embedded one in the folder.
      reached: see Surroundings.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_servers: int,
        version: str,
        settings: Settings,
        connect: Callable[[str, str], RemoteServer],
        clock: Callable[[], float],
        say: Say,
        log: Log | None = None,
        reached: Callable[[str], None] = lambda point: None,
    ):
        self._folder = folder
        self._num_servers = num_servers
        self._version = version
        self._settings = settings
        self._connect = connect
        self._clock = clock
        self._say = say
        self._reached = reached
        self._log = log or Log.embedded(folder / "coordinator.db")
        self._changed = threading.Condition()  # guards what follows
        self._servers = Registry(settings, clock())
        self._drivers: dict[str, Driver] = {}
        self._waiting = self._log.jobs()  # for servers, since a restart
        self._began = clock()
        self._tried_with: set[str] | None = None  # servers, to take up jobs
        self._failure: str | None = None
        self._must_fix = False
        methods: dict[str, Callable[[Message], Message]] = {
            "RegisterServer": self.register_server,
            "Beat": self.beat,
            "LeaveServer": self.leave_server,
            "OpenJob": self.open_job,
            "Alive": self.alive,
            "Next": self.next,
            "Servers": self.servers,
            "Contribute": self.contribute,
            "ContributeSum": self.contribute,
            "Clean": self.clean,
            "Status": self.status,
        }
        methods |= {n: functools.partial(self._ask, m) for n, m in ASKED.items()}
        self.methods = {name: self._log.leading(call) for name, call in methods.items()}

    # Calls of servers.

    def register_server(self, message: Message) -> Message:
        """Takes in a server. Jobs of the log are loaded once all are there."""
        name, address = (requests.text(message, field) for field in ("name", "address"))
        if (found := message.get("version", self._version)) != self._version:
            raise Refused(
                f"server {name} runs meshloom {found}, the coordinator "
                f"{self._version}. Install the same version on both."
            )
        server = self._connect(name, address)
        with self._changed:
            known = self._servers.get(name)
            beats = status.ServerBeats(address, self._clock())
            jobs = frozenset(message.get("jobs", ()))
            self._servers[name] = Registered(server, beats, jobs)
            missing = self._num_servers - len(self._servers)
            # With the lock: `watch` may be about to say that the one before is lost.
            for group in moving(self._drivers.values()):
                if known is not None:  # started again: what it held is gone
                    group.note(name, None)
                group.note(name, server)
            self._changed.notify_all()
        if known is not None and known.server.address != address:
            known.server.mark_lost()  # ends calls that nobody will answer
        if known is None:
            need = f"; waiting for {missing} more" if missing > 0 else ""
            about = {"server": name, "address": address}
            self._say(f"server {name} is here{need}", "server_joined", **about)
        self._take_up_jobs()
        lease = self._settings.lease_seconds
        return {"lease_seconds": lease, "term": self._log.term}

    def beat(self, message: Message) -> Message:
        name = requests.text(message, "name")
        with self._changed:
            if name not in self._servers:
                raise Refused(f"server {name} is not registered here: register again")
            self._servers[name].beats.hear(message, self._clock())
        return {}

    def leave_server(self, message: Message) -> Message:
        """Lets a server go once others have its blocks; to be asked again until then.

        The only copies of blocks stay where they are.
        """
        name = requests.text(message, "name")
        with self._changed:
            if (registered := self._servers.get(name)) is None:
                return {"is_free": True}
            registered.is_leaving = True
            groups = [driver.job.servers for driver in self._drivers.values()]
        for group in groups:
            group.leave(name)
        return {"is_free": all(group.is_free(name) for group in groups)}

    # Calls of learners.

    def open_job(self, message: Message) -> Message:
        """Opens a job, or checks that the one of this name is the same."""
        spec = parse_spec(message, self._version)

        def may_open() -> bool:
            if spec.job in self._waiting:  # of the log: it is taken up
                return False
            return spec.job in self._drivers or not self._missing()

        self._await(may_open, "servers")
        with self._changed:
            driver = self._drivers.get(spec.job)
            if driver is None:
                driver = self._open(spec)
        check_same(driver.job.spec, spec)
        return driver.ask("describe", {}, ANSWER_SECONDS)

    def alive(self, message: Message) -> Message:
        """Renews a lease. The answer may be that the learner must join again."""
        learner, incarnation = requests.who(message)
        board = self._driver(message).job.board
        board.check()
        board.hear(learner, incarnation, self._clock())
        answer = board.wait(learner, incarnation, after=-1, seconds=0)
        if answer["state"] == "left":
            raise Refused(f"learner {learner} must join again: {answer['reason']}")
        return {}

    def next(self, message: Message) -> Message:
        """Waits until a learner may do a round after `round`."""
        learner, incarnation = requests.who(message)
        after = message.get("round", 0)
        seconds = message.get("seconds", POLL_SECONDS)
        if type(after) is not int or not isinstance(seconds, int | float):
            raise Refused(f"Next: round is {after!r}, seconds is {seconds!r}")
        board = self._driver(message).job.board
        board.hear(learner, incarnation, self._clock())
        seconds = min(float(seconds), POLL_SECONDS, self._settings.lease_seconds / 2)
        answer = board.wait(learner, incarnation, after, seconds)
        board.hear(learner, incarnation, self._clock())
        return answer

    def servers(self, message: Message) -> Message:
        """Returns where the blocks of a job are; does not wait for the job."""
        driver = self._driver(message)
        driver.job.board.check()
        return driver.job.servers.describe()

    def contribute(self, message: Message) -> Message:
        """Records a contribution that the servers have, or of a sum of some.

        One that was sent to a merger is not on the servers: it must be sent again.
        """
        if message.get("place") is not None:
            return {"state": "elsewhere"}
        return self._ask(
            "contribute_sum" if "tree" in message else "contribute", message
        )

    def status(self, message: Message) -> Message:
        """Returns the state of one job, or of everything."""
        now = self._clock()
        if "job" in message:
            driver = self._driver(message)
            return status.answer(driver.status, driver.job.board, now)
        with self._changed:
            known = dict.fromkeys(self._waiting, {"state": "waiting for servers"})
            drivers = dict(self._drivers)
            servers = [r.beats.answer(n, now) for n, r in self._servers.items()]
        jobs = {
            n: status.answer(d.status, d.job.board, now) for n, d in drivers.items()
        }
        return {
            "version": self._version,
            "term": self._log.term,
            "num_servers": self._num_servers,
            "servers": sorted(servers, key=lambda server: server["name"]),
            "jobs": {**known, **jobs},
        }

    def clean(self, message: Message) -> Message:
        """Removes unneeded state, of one job or of all; says what."""
        if "job" in message:
            self._driver(message)
        self._await(lambda: not self._waiting, "servers")
        with self._changed:
            drivers = dict(self._drivers)
        wanted = {n: d for n, d in drivers.items() if message.get("job", n) == n}
        jobs = {n: d.ask("clean", message, CLEAN_SECONDS) for n, d in wanted.items()}
        return {"jobs": jobs}

    # What the process around it does.

    @property
    def failure(self) -> str | None:
        """Why the service cannot go on, or None."""
        with self._changed:
            return self._failure

    @property
    def must_fix(self) -> bool:
        """Whether the user must fix something before the service can go on."""
        with self._changed:
            return self._must_fix

    def watch(self) -> None:
        """Notices servers that sent no heartbeat; to be called periodically.

        Raises Deposed if another coordinator may lead.
        """
        self._log.check()
        with self._changed:
            drivers = list(self._drivers.values())
            groups = [driver.job.servers for driver in drivers]
            lost = self._servers.take_lost(self._clock(), groups)
            for group in moving(self._drivers.values()):
                for name in lost:
                    group.note(name, None)
        for name, (server, reason) in lost.items():
            self._say(reason, "server_lost", server=name)
            for driver in drivers:
                if driver.job.spec.copies == 1 and name in driver.job.servers.names:
                    driver.fail(reason)
                    self._fail(f"{driver.job.board.failure}")
            server.mark_lost()  # last, so that this is the reason
        self._take_up_jobs()

    def is_over(self) -> bool:
        """Whether there were jobs, all are done, and no learner is left."""
        with self._changed:
            states = [driver.status for driver in self._drivers.values()]
            is_open = bool(self._waiting)
        done = all(s["state"] == "done" and not s["learners"] for s in states)
        return bool(states) and not is_open and done

    def stop(self, reason: str) -> list[str]:
        """Saves and ends every job; returns a line about each."""
        lines = []
        with self._changed:
            drivers = dict(self._drivers)
        for name, driver in drivers.items():
            try:
                saved = driver.ask("save_now", {}, 300.0)
                lines.append(f"{name}: saved at version {saved['version']}")
            except (Refused, Unavailable) as error:
                lines.append(f"{name}: not saved: {error}")
            driver.stop(reason, seconds=ANSWER_SECONDS)
        return lines

    def close(self) -> None:
        """Ends all jobs without saving, and lets go of the log."""
        with self._changed:
            drivers = list(self._drivers.values())
        for driver in drivers:
            driver.stop("the service has stopped", seconds=ANSWER_SECONDS)
            driver.job.servers.close()
        self._log.close()

    def _missing(self) -> int:
        return max(0, self._num_servers - len(self._servers))

    def _await(self, is_ready: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(is_ready, ANSWER_SECONDS):
                raise Unavailable(
                    f"the service is waiting for {what}: {len(self._servers)} of "
                    f"{self._num_servers} servers are here; try again"
                )

    def _driver(self, message: Message) -> Driver:
        name = requests.text(message, "job")
        self._await(lambda: name not in self._waiting, "servers")
        with self._changed:
            if name not in self._drivers:
                known = sorted(self._drivers)
                raise Refused(f"there is no job {name!r} here, but {known}; open it")
            return self._drivers[name]

    def _ask(self, method: str, message: Message) -> Message:
        driver = self._driver(message)
        learner, incarnation = message.get("learner"), message.get("incarnation")
        if type(learner) is int and type(incarnation) is int:
            driver.job.board.hear(learner, incarnation, self._clock())
        return driver.ask(method, message, ANSWER_SECONDS)

    def _take_up_jobs(self) -> None:
        """Takes up the jobs of the log, if all servers are there, or enough of them."""
        with self._changed:
            seconds = self._clock() - self._began
            is_late = seconds > self._settings.lease_seconds
            if not self._waiting or (self._missing() and not is_late):
                return
            if self._missing() and self._tried_with == set(self._servers):
                return  # the log is long, perhaps
            self._tried_with = set(self._servers)
            for name in list(self._waiting):
                history = make_history(self._log.read(name))
                assert history.spec is not None, name
                placement = history.placement
                spec = parse_spec(history.spec, history.spec["version"])
                if self._missing() and not self._servers.hold_all(spec, placement):
                    continue  # one of its only copies may still come
                self._start(spec, self._servers.group(spec, self._log, self._say))
                self._waiting.remove(name)  # not before: it may fail, and try again
            self._changed.notify_all()

    def _open(self, spec: JobSpec) -> Driver:
        """Opens a new job; the lock is held."""
        group = self._servers.group(spec, self._log, self._say)
        body = {"spec": spec.message, "servers": group.names}
        try:
            self._log.append(spec.job, "spec", body)
        except sqlite3.OperationalError as error:
            reason = disk.describe(error, self._log.name, self._folder)
            remedy = disk.remedy_of(error)
            reason = f"job {spec.job!r} cannot be opened: {reason}"
            if remedy is not None:
                reason += f". {remedy}, then start the service again"
            self._fail(reason, must_fix=remedy is not None)
            raise Unavailable(reason) from error
        text = f"{spec.job}: opened for {spec.num_learners} learners"
        self._say(text, "opened", job=spec.job, learners=spec.num_learners)
        return self._start(spec, group)

    def _start(self, spec: JobSpec, group: ServerGroup) -> Driver:
        around = Surroundings(
            folder=self._folder / spec.job,
            log=self._log,
            clock=self._clock,
            say=functools.partial(self._say, job=spec.job),
            settings=self._settings,
            reached=self._reached,
        )
        driver = Driver(Job(spec, group, around), self._on_failure)
        self._drivers[spec.job] = driver
        return driver

    def _on_failure(self, job: str, message: str, must_fix: bool) -> None:
        self._say(f"{job}: {message}", "failed", job=job)
        self._fail(message, must_fix)

    def _fail(self, reason: str, must_fix: bool = False) -> None:
        with self._changed:
            if self._failure is None:
                self._failure, self._must_fix = reason, must_fix
            self._changed.notify_all()
