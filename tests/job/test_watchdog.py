"""Progress is reported to a file, and a thread ends a process that makes none."""

import json
import subprocess
import sys
import time

import pytest

from meshloom.launch import progress_file
from meshloom.launch.exit_codes import WATCHDOG
from meshloom.trainer.job import watchdog


class Figure:
    ready = False

    def is_ready(self):
        return self.ready


def test_steps_count_when_they_are_done(tmp_path):
    file = tmp_path / "progress.json"
    dog = watchdog.Watchdog(tmp_path, report_to=file)
    figures = [Figure(), Figure(), Figure()]
    for step, figure in enumerate(figures[:2], start=1):
        dog.started(step, figure)
    dog.beat(allow=5)
    assert progress_file.read(file).step is None
    assert json.loads(file.read_text())["allow"] == 5
    dog._poll()
    assert progress_file.read(file).step is None
    figures[0].ready = figures[1].ready = True
    dog._poll()
    # A step that was dispatched before the allowance does not end it; a later one does.
    report = progress_file.read(file)
    assert (report.step, report.allow) == (2, 5)
    dog.started(3, figures[2])
    figures[2].ready = True
    dog._poll()
    report = progress_file.read(file)
    assert (report.step, report.allow) == (3, 0)


STUCK = """
import os, pathlib, sys, threading, time
from meshloom.trainer.job import watchdog
from meshloom.trainer.job.group import Group

watchdog.POLL_SECONDS, watchdog.REQUEST_SECONDS = 0.02, 0.5
number, seconds = int(sys.argv[2]), float(sys.argv[3])

def stuck_in_the_reader():
    time.sleep(60)

threading.Thread(target=stuck_in_the_reader, daemon=True).start()
group = Group(number, 3, object())
folder = pathlib.Path(sys.argv[1])
with watchdog.Watchdog(folder, group, start_seconds=seconds, end=os._exit):
    print("open", flush=True)
    time.sleep(60)
"""


def start(folder, number, seconds):
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(folder), str(number), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process


def test_a_stuck_process_ends_with_the_stacks_of_all(tmp_path):
    patient = start(tmp_path, 1, 100)
    try:
        assert patient.stdout.readline() == "open\n"
        stuck = start(tmp_path, 0, 0.3)
        try:
            _, error = stuck.communicate(timeout=60)
        finally:
            stuck.kill()
        assert stuck.returncode == WATCHDOG
        assert "meshloom: process 0: no progress for" in error
        assert f"stacks are in {tmp_path}/stacks; process 2 wrote none" in error
        assert patient.poll() is None  # within its own limit
    finally:
        patient.kill()
        patient.communicate(timeout=60)
    for number, why in enumerate(("no progress", "requested by another process")):
        text = (tmp_path / "stacks" / f"process-{number}.txt").read_text()
        assert why in text and "stuck_in_the_reader" in text


def test_beats_keep_a_process_alive(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(watchdog.Watchdog, "_end", lambda self, why: ended.append(why))
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.01)
    with watchdog.Watchdog(tmp_path, start_seconds=2) as dog:
        for _ in range(30):
            time.sleep(0.1)
            dog.beat()
        assert ended == []
        deadline = time.monotonic() + 60
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "before the first step" in ended[0]


def test_an_old_request_is_ignored(tmp_path):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / watchdog.REQUEST).write_text("old")
    dog = watchdog.Watchdog(tmp_path)
    dog._began += 1
    assert not dog._is_requested()


@pytest.mark.parametrize("seconds", [0, None])
def test_zero_never_ends_the_process(tmp_path, seconds):
    assert watchdog.Watchdog(tmp_path, stall_seconds=seconds)._is_watched == (
        seconds is None
    )
