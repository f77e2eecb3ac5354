"""A disk that is full stops a job with one line, and takes nothing back."""

import errno
import os
import sqlite3
import time

import pytest

from meshloom.service.coordinator import disk
from meshloom.service.coordinator.driver import Driver
from meshloom.service.wire.errors import Refused, Unavailable

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/x")


@pytest.mark.parametrize(
    "error, remedy",
    [
        (FULL, "Free some space"),
        (sqlite3.OperationalError("database or disk is full"), "Free some space"),
        (sqlite3.OperationalError("disk I/O error"), "Check the disk"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "Make the folder writable"),
        (Refused(f"not saved to /x: {os.strerror(errno.ENOSPC)}"), "Free some space"),
        (Refused("is not staged at s0"), None),
        (ConnectionError("server s1 is lost"), None),
    ],
)
def test_what_the_user_must_fix_is_told_apart(error, remedy):
    assert disk.remedy_of(error) == remedy


BREAKS = {
    "the log": ("append_all", sqlite3.OperationalError("database or disk is full")),
    "the rows": ("write_commit", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "a checkpoint": ("prepare", FULL),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_full_disk_stops_the_job_and_nothing_that_counts_is_lost(
    what, make_house, monkeypatch, caplog
):
    house = make_house(save_every=2)
    job = house.start()
    for learner in range(2):
        house.ask("join", learner=learner)
    house.initialize()
    play(house, 1)
    name, error = BREAKS[what]
    owner = {"append_all": house.log, "write_commit": job.files}.get(
        name, job.checkpoints
    )

    def fail(*_, **__):
        raise error

    failures: list = []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        driver = Driver(job, lambda *about: failures.append(about))
        for learner in range(2):
            house.stage(learner, 1, 2, 1.0)
            message = {"learner": learner, "incarnation": 1, "round": 2, "base": 1}
            facts = {"weight": 2.0, "steps": 1, "sums": {"weight": 2.0}}
            if name == "append_all":
                with pytest.raises(Unavailable, match="disk is full. Free some space,"):
                    driver.ask("contribute", {**message, **facts}, 5)
                break
            driver.ask("contribute", {**message, **facts}, 5)
        deadline = time.monotonic() + 5
        while not failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (about,) = failures
    assert about[0] == "run" and about[2] is True
    assert about[1].startswith("job 'run' has stopped: /"), about
    assert "then start the service again: it continues" in about[1]
    assert "Traceback" not in caplog.text
    house.start()  # the disk has space again
    assert house.job is not None
    version = house.job.engine.version
    assert version == (1 if what == "the log" else 2)
    play(house, version + 1)
    assert [e["version"] for e in commits(house)] == list(range(1, version + 2))


def play(house, round: int) -> None:
    for learner in range(2):
        house.stage(learner, 1, round, 1.0)
    for learner in range(2):
        house.contribute(learner, 1, round, round - 1)
    place = house.next(0, 1, round)
    assert (place["state"], place["version"]) == ("go", round)


def commits(house) -> list[dict]:
    return house.job.files.commits.read()
