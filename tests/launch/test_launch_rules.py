"""The supervisor's rules, without processes: exit codes, progress, stalls, restarts."""

import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from meshloom.launch import exit_codes, progress_file, target, workers
from meshloom.launch.exit_codes import Ending
from meshloom.launch.progress_file import Report
from meshloom.launch.progress_watch import Watch
from meshloom.launch.restarts import Restarts
from meshloom.launch.settings import Settings

# Exit codes.


@pytest.mark.parametrize(
    "found, worker",
    [
        ([(0, -6), (1, -9)], 1),  # jax aborts where a peer has died
        ([(0, 1), (1, -11)], 1),
        ([(0, 2), (1, -9)], 1),  # an error may be a consequence of the kill
        ([(0, -6), (1, 2)], 1),
        ([(0, 75), (1, 76)], 1),
        ([(0, 1), (1, 75)], 1),
        ([(0, 0), (1, 1)], 1),
        ([(0, -9), (1, -9)], 0),
    ],
)
def test_the_death_that_brought_about_the_others(found, worker):
    cause = exit_codes.cause([Ending(number, status) for number, status in found])
    assert cause is not None and cause.worker == worker


def test_where_all_are_done_there_is_no_death():
    assert exit_codes.cause([Ending(0, 0), Ending(1, 0)]) is None
    assert exit_codes.cause([]) is None


def test_endings_in_words():
    assert str(Ending(3, -signal.SIGKILL, 37)) == (
        "worker 3 was killed by signal 9 (SIGKILL) at step 37"
    )
    assert str(Ending(0, 76)).startswith("worker 0 exited with code 76 (its watchdog")
    assert str(Ending(0, -40)) == "worker 0 was killed by signal 40 (unknown)"


@pytest.mark.parametrize(
    "ends, status",
    [
        ([0, 0], 0),
        ([75, 0], 75),
        ([75, 75], 75),
        ([75, -9], 143),
        ([2], 143),
        ([], 143),
    ],
)
def test_status_after_a_stop(ends, status):
    assert exit_codes.after_stop(ends, signal.SIGTERM) == status


# The progress file.


def test_reports_are_read_as_written(tmp_path):
    file = tmp_path / "progress.json"
    assert progress_file.read(file) is None
    progress_file.write(file, None)
    assert progress_file.read(file).step is None
    progress_file.write(file, 37, allow=300)
    report = progress_file.read(file)
    assert (report.step, report.allow) == (37, 300)
    assert set(json.loads(file.read_text())) == {"step", "time", "allow"}
    progress_file.write(file, 37, status=75)
    assert progress_file.read(file).status == 75
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "7",
        '{"step": 1}',
        '{"step": 1.5, "time": 0}',
        '{"step": 1, "time": "x"}',
    ]
    + ['{"step": true, "time": 0}', '{"step": 1, "time": 0, "allow": -1}']
    + ['{"step": 1, "time": 0, "status": "done"}'],
)
def test_other_reports_are_refused(text, tmp_path):
    file = tmp_path / "progress.json"
    file.write_text(text)
    expected = f"progress.json holds {re.escape(repr(text))}; expected"
    with pytest.raises(ValueError, match=expected):
        progress_file.read(file)


def test_a_file_that_is_still_empty_is_no_report_yet(tmp_path):
    file = tmp_path / "progress.json"
    file.touch()
    assert progress_file.read(file) is None


def test_leaving_says_the_status_at_the_last_step(tmp_path, monkeypatch):
    file = tmp_path / "progress.json"
    assert progress_file.leave(75) == 75  # nobody wants to know
    monkeypatch.setenv(progress_file.VARIABLE, str(file))
    assert progress_file.leave(2) == 2
    assert progress_file.read(file).status == 2
    progress_file.write(file, 37, allow=300)
    assert progress_file.leave(0) == 0
    found = progress_file.read(file)
    assert (found.step, found.allow, found.status) == (37, 0, 0)


@pytest.mark.parametrize(
    "own, said, status",
    [
        (0, [75, 75], 75),  # MPICH, where both end together
        (-15, [75, 75], 75),  # Slurm, which kills the second
        (0, [0, 75], 75),
        (9, [0, 0], 0),
        (0, [0, None], 1),
        (75, [75, None], 75),
        (-9, [None, 75], -9),
        (0, [None, None], 0),  # a command that reports no status
        (3, [], 3),
    ],
)
def test_processes_know_their_status_better_than_mpirun(own, said, status, tmp_path):
    lone = workers.Group(None, None, None, 2)  # type: ignore
    lone.workers = [SimpleNamespace(number=0, name="mpirun", host="", status=own)]  # type: ignore
    reports = {n: Report(n, 0.0, status=one) for n, one in enumerate(said)}
    (found,) = lone.endings(reports)
    assert found == exit_codes.Ending(
        0, status, len(said) - 1 if said else None, "mpirun"
    )


# Stalls.


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def watch_of(clock, **settings) -> Watch:
    settings = {"stall_seconds": None, "start_seconds": 600.0} | settings
    return Watch(clock=clock, **settings)


def stalls_after(watch: Watch, clock: Clock) -> float:
    """Seconds from now until the group counts as stalled."""
    begin = clock.now
    while not watch.has_stalled:
        clock.now += 1
        assert clock.now < begin + 10_000
    seconds, clock.now = clock.now - begin - 1, begin
    return seconds


def reports(watch: Watch, clock: Clock, every: float, count: int, worker: int = 0):
    for number in range(1, count + 1):
        clock.now += every
        watch.see(worker, Report(number, clock.now))


def test_before_the_first_step_the_limit_is_generous(clock):
    watch = watch_of(clock)
    watch.see(0, Report(None, 0))
    assert stalls_after(watch, clock) == 600
    watch.see(0, Report(1, 1))
    assert stalls_after(watch, clock) == 60


@pytest.mark.parametrize("every, limit", [(1, 60), (6, 60), (7, 70), (30, 300)])
def test_the_limit_follows_the_median(every, limit, clock):
    watch = watch_of(clock)
    clock.now += 500  # compiling is no step
    reports(watch, clock, every, 9)
    clock.now += 1000  # one that took long changes no median
    watch.see(0, Report(10, clock.now))
    assert stalls_after(watch, clock) == limit


def test_a_limit_that_is_given_is_the_limit(clock):
    watch = watch_of(clock, stall_seconds=5)
    reports(watch, clock, 30, 9)
    assert stalls_after(watch, clock) == 5


def test_a_report_may_ask_for_more_time_and_not_for_less(clock):
    watch = watch_of(clock, stall_seconds=5)
    watch.see(0, Report(1, 1, allow=300))
    assert stalls_after(watch, clock) == 300
    watch.see(0, Report(2, 2, allow=1))
    assert stalls_after(watch, clock) == 5


def test_any_worker_that_gets_on_is_progress_of_the_group(clock):
    watch = watch_of(clock)
    reports(watch, clock, 1, 9, worker=0)
    clock.now += 50
    watch.see(1, Report(9, clock.now))
    assert stalls_after(watch, clock) == 60
    clock.now += 50
    assert not watch.see(1, Report(9, clock.now - 50))  # the same again
    assert stalls_after(watch, clock) == 10


def test_without_reports_nothing_stalls(clock):
    watch = watch_of(clock)
    clock.now += 500
    assert not watch.only_checks_liveness
    clock.now += 101
    assert watch.only_checks_liveness and not watch.has_stalled
    watch.see(0, Report(None, 0))
    assert not watch.only_checks_liveness
    # One attempt has reported, so the next is expected to.
    watch.begin()
    assert stalls_after(watch, clock) == 600


def test_only_steps_further_than_ever_are_progress_of_the_job(clock):
    watch = watch_of(clock)
    found = [watch.see(0, Report(step, step)) for step in (1, 2, 3)]
    watch.begin()
    assert watch.reports == {} and watch.step is None
    assert not watch.see(0, Report(None, 4))
    found += [watch.see(0, Report(step, 4 + step)) for step in (2, 3, 4)]
    assert found == [True, True, True, False, False, True]


# Restarts.


def died(worker: int, status: int = -9) -> Ending:
    return Ending(worker, status)


def attempt(restarts: Restarts, death: Ending | None, *, progress: bool = False):
    restarts.begin()
    if progress:
        restarts.progress()
    return restarts.after(death)


def test_a_first_restart_comes_at_once_and_delays_double_up_to_the_longest():
    restarts = Restarts(2, least=2, limit=100)
    delays = [attempt(restarts, died(n % 2)).delay for n in range(80)]
    assert delays[:8] == [0, 1, 2, 4, 8, 16, 30, 30] and delays[-1] == 30
    assert attempt(restarts, died(0), progress=True).delay == 0
    assert attempt(restarts, died(0)).delay == 1


def test_deaths_and_stalls_count_alike():
    restarts = Restarts(2, least=2, limit=2)
    assert attempt(restarts, None).status is None
    assert attempt(restarts, died(1)).message.endswith("(2 of 2 without progress)")
    assert attempt(restarts, None).status == exit_codes.GAVE_UP
    none = attempt(Restarts(2, least=2, limit=0), died(0))
    assert none.message == "giving up, no restart is allowed"


@pytest.mark.parametrize(
    "deaths",
    [
        [(died(1), False), (died(0), False), (died(1), False)],  # not in a row
        [(died(1), False), (None, False), (died(1), False)],
        [(died(1), True), (died(1), False)],  # the first came after progress
        [(died(1), False), (died(1), True), (died(1), False)],
    ],
)
def test_deaths_that_are_no_reason_to_shrink(deaths):
    restarts = Restarts(3, least=1, limit=9)
    for death, progress in deaths:
        attempt(restarts, death, progress=progress)
    assert restarts.size == 3


def test_a_new_size_starts_a_new_count():
    restarts = Restarts(3, least=1, limit=2)
    words = [attempt(restarts, died(0)).message for _ in range(6)]
    assert restarts.size == 1
    assert [re.search(r"\d of", text)[0] for text in words] == (
        ["1 of", "2 of", "1 of", "1 of", "1 of", "2 of"]
    )
    assert attempt(restarts, died(0)).status == exit_codes.GAVE_UP


def test_bad_input_after_progress_at_a_new_size_is_final():
    restarts = Restarts(3, least=1, limit=2)
    for _ in range(2):
        attempt(restarts, died(0))
    assert restarts.size == 2
    refused = died(0, exit_codes.BAD_INPUT)
    assert attempt(restarts, refused, progress=True).status == exit_codes.BAD_INPUT


# Settings, the guard and the environment.


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"processes": 0}, "--processes must be at least 1, got 0"),
        ({"min_processes": 3}, "--min-processes is 3, more than --processes 2; it"),
        ({"max_restarts": -1}, "--max-restarts must not be negative, got -1"),
        ({"stall_seconds": 0}, "--stall-seconds must be more than 0, got 0"),
        ({"grace_seconds": float("nan")}, "--grace-seconds must be more than 0"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"processes": 2, **settings})


def test_a_worker_whose_parent_is_gone_does_not_begin():
    argv = [*workers.GUARD, "worker", str(os.getpid() + 1), sys.executable, "-c", "1/0"]
    found = subprocess.run(argv, capture_output=True, timeout=60)
    assert (found.returncode, found.stderr) == (-signal.SIGKILL, b"")


def test_ports_are_never_used_twice(monkeypatch):
    ports = iter([5, 5, 6])

    class Socket:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def bind(self, address):
            assert address == ("127.0.0.1", 0)

        def getsockname(self):
            return ("127.0.0.1", next(ports))

    monkeypatch.setattr(target.socket, "socket", Socket)
    used: set[int] = set()
    assert [target.free_port(used), target.free_port(used)] == [5, 6]
