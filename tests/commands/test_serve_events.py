"""Events of a service: one JSON object per line, with the lines that it says."""

import errno
import json
import os
import threading
import time

import pytest

from meshloom.trainer.commands.serve_events import Events


def rows(folder) -> list[dict]:
    text = (folder / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_is_said_and_recorded(tmp_path, capfd):
    before = time.time()
    events = Events("server", tmp_path)
    events.say("server at a:1", "started", address="a:1")
    events.say("", "left", learner=3, reason="signal 9")
    events.say("something else")
    assert capfd.readouterr().out == (
        "meshloom serve: server at a:1\nmeshloom serve: something else\n"
    )
    found = rows(tmp_path)
    assert all(abs(row.pop("time") - before) < 60 for row in found)
    assert found == [
        {
            **{"role": "server", "event": "started"},
            **{"address": "a:1", "text": "server at a:1"},
        },
        {"role": "server", "event": "left", "learner": 3, "reason": "signal 9"},
        {"role": "server", "event": "note", "text": "something else"},
    ]


def test_who_stands_by_writes_no_file(tmp_path, capfd):
    events = Events("coordinator")
    events.say("standing by")
    assert not list(tmp_path.iterdir())
    events.write_to(tmp_path)
    events.say("leads", "leads", term=2)
    assert [row["event"] for row in rows(tmp_path)] == ["leads"]


def test_lines_of_several_threads_stay_whole(tmp_path, capfd):
    events = Events("both", tmp_path)

    def tell(number: int) -> None:
        for _ in range(50):
            events.say("x" * 500, "note", number=number)

    threads = [threading.Thread(target=tell, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rows(tmp_path)
    assert len(found) == 200 and {row["number"] for row in found} == set(range(4))


@pytest.mark.parametrize("call", ["write", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_under_the_events_ends_nothing(tmp_path, monkeypatch, code, call):
    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    events = Events("both", tmp_path)
    if code == errno.ENOSPC:
        events.say("a line")
    else:  # anything else is not hidden
        with pytest.raises(OSError, match=os.strerror(code)):
            events.say("a line")
