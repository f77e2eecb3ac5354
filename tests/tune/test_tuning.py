"""A search with a stand-in for the training: what it starts, stops and repeats."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import optuna
import pytest

from meshloom.trainer.tune import page
from meshloom.trainer.tune.space import Choice, Dimension, Range, Space
from meshloom.trainer.tune.study import Definition, next_trial, open_study, running
from meshloom.trainer.tune.tuning import Tuning, trial_folder

FAKE = pathlib.Path(__file__).with_name("fake_train.py")
STATES = optuna.trial.TrialState
LOSSES = Space((Dimension("loss", Range(low=0.0, high=1.0), "space.gin:1"),))


def choices(*texts: str) -> Space:
    return Space((Dimension("loss", Choice(texts), "space.gin:1"),))


def definition(**changes) -> Definition:
    fields = dict(
        config="digest",
        space={"loss": "0 to 1"},
        metric="loss",
        direction="minimize",
        sampler="random",
        pruner="none",
        seed=0,
    )
    return Definition(**(fields | changes))


def tuning(folder, space=LOSSES, *, steps=3, seconds=0.0, log=None, **changes):
    own = {k: changes.pop(k) for k in ("trials", "parallel") if k in changes}
    return Tuning(
        folder=folder,
        definition=definition(**changes),
        space=space,
        command=lambda folder, settings: [
            *(sys.executable, "-I", "-S", str(FAKE), str(folder)),
            *(settings["loss"], str(steps), str(seconds)),
        ],
        env=dict(os.environ),
        log=log or (lambda line: None),
        **{"trials": 4, "parallel": 2, **own},
    )


def starts(folder: pathlib.Path, number: int) -> list[int]:
    text = (trial_folder(folder, number) / "starts").read_text()
    return [int(line) for line in text.split()]


def test_all_trials_run_once_and_the_best_is_written(tmp_path):
    lines: list[str] = []
    search = tuning(tmp_path / "s", trials=6, log=lines.append)
    assert search.run() == 0
    trials = search.study().trials
    assert [t.state for t in trials] == [STATES.COMPLETE] * 6
    for trial in trials:
        loss = trial.params["loss"]
        assert trial.intermediate_values == {s: loss + 1 / s for s in (1, 2, 3)}
        assert trial.value == loss + 1 / 3
        assert len(starts(search.folder, trial.number)) == 1
    least = min(trials, key=lambda trial: trial.params["loss"])
    text = (search.folder / "best.gin").read_text()
    assert text == f"# The best trial so far: {least.number:04d} of s\n" + (
        f"loss = {least.params['loss']!r}\n"
    )
    assert len({trial.params["loss"] for trial in trials}) == 6
    # The same command again has nothing left to do.
    assert search.run() == 0
    assert len(search.study().trials) == 6


def test_a_bad_trial_is_stopped_early(tmp_path):
    # By the median rule a trial is compared once five others have ended.
    search = tuning(
        tmp_path / "s", trials=9, parallel=1, steps=4, seconds=0.3, pruner="median"
    )
    assert search.run() == 0
    trials = search.study().trials
    pruned = [t for t in trials if t.state == STATES.PRUNED]
    assert pruned and all(t.number >= 5 for t in pruned)
    for trial in pruned:
        others = [t.params["loss"] for t in trials[: trial.number]]
        assert trial.params["loss"] > sorted(others)[len(others) // 2 - 1]
        assert len(trial.intermediate_values) < 4
        assert "stopped early at step" in trial.user_attrs["reason"]
    # A better one than all before is never stopped.
    assert search.study().best_trial.state == STATES.COMPLETE


@pytest.mark.parametrize(
    "loss, state, reason, attempts",
    [
        ("bad", STATES.FAIL, "exited with code 2 (bad input): this is wrong", 1),
        ("NaN", STATES.FAIL, "held-out loss is nan at step 1", 1),
        ("die", STATES.COMPLETE, None, 2),
    ],
)
def test_how_a_trial_ends(tmp_path, loss, state, reason, attempts):
    search = tuning(tmp_path / "s", choices(loss, loss), trials=1, parallel=1)
    assert search.run() == 0
    (trial,) = search.study().trials
    assert trial.state == state
    found = trial.user_attrs.get("reason")
    assert found is None if reason is None else reason in found
    assert len(starts(search.folder, 0)) == attempts


def test_a_search_that_only_fails_ends_with_the_reason(tmp_path):
    search = tuning(tmp_path / "s", choices("bad", "bad"), trials=9, parallel=1)
    with pytest.raises(ValueError, match="the first 3 trials failed.*this is wrong"):
        search.run()
    assert len(search.study().trials) == 3


def is_running(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait(done, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end_after(command, folder: pathlib.Path, least: int, number: int) -> None:
    """Ends a search while trials run and at least so many have ended."""
    process = subprocess.Popen(command, start_new_session=True)

    def is_moment() -> bool:
        assert process.poll() is None
        files = folder.glob("trials/*/eval.jsonl")
        rows = [len(path.read_text().splitlines()) for path in files]
        return rows.count(4) >= least and len(rows) > least

    try:
        wait(is_moment)
        process.send_signal(number)
        assert process.wait(30) == (-9 if number == signal.SIGKILL else 75)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    files = list(folder.glob("trials/*/starts"))
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    wait(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_search_that_was_ended_loses_and_repeats_nothing(tmp_path, number):
    folder = tmp_path / "s"
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pathlib, test_tuning as t;"
        "s = t.tuning(pathlib.Path(sys.argv[2]), trials=8, steps=4, seconds=0.25);"
        "sys.exit(s.run())"
    )
    command = [sys.executable, "-c", script, str(FAKE.parent), str(folder)]
    for least in (1, 4):
        end_after(command, folder, least, number)
    search = tuning(folder, trials=8, steps=4)
    assert search.run() == 0
    trials = search.study().trials
    assert [t.state for t in trials] == [STATES.COMPLETE] * 8
    # The same values as those of a search that nobody has ended.
    other = tuning(tmp_path / "other", trials=8, steps=4)
    assert other.run() == 0
    assert [t.params for t in trials] == [t.params for t in other.study().trials]
    assert [t.value for t in trials] == [t.value for t in other.study().trials]
    counts = [len(starts(folder, number)) for number in range(8)]
    assert max(counts) >= 2 and sum(counts) <= 8 + 2 * 2


def test_a_trial_that_was_killed_while_values_were_picked_is_completed(tmp_path):
    space = Space(tuple(Dimension(n, Range(low=0.0, high=1.0), n) for n in ("a", "b")))
    study = open_study(f"sqlite:///{tmp_path / 'study.db'}", definition())
    first = study.ask()
    first.suggest_float("a", 0.0, 1.0)
    (trial,) = running(study, space, definition())
    assert trial.number == 0 and trial.params["a"] == first.params["a"]
    assert set(trial.user_attrs["settings"]) == {"a", "b"}
    assert next_trial(study, space, definition()).number == 1
    assert [t.number for t in running(study, space, definition())] == [0, 1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"config": "other"}, "another value of the config"),
        ({"space": {"loss": "1 to 2"}}, "another value of the search space"),
        ({"seed": 1}, r"another value of --seed \(0, now 1\)"),
        ({"direction": "maximize"}, "another value of --direction"),
    ],
)
def test_another_definition_is_refused(tmp_path, changes, message):
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    open_study(storage, definition())
    if "direction" in changes:
        message = "direction"
    with pytest.raises(ValueError, match=message):
        open_study(storage, definition(**changes))


def test_two_searches_in_one_folder_and_bad_storage(tmp_path):
    search = tuning(tmp_path / "s")
    with search._locked(), pytest.raises(ValueError, match="in use by another search"):
        search.run()
    with pytest.raises(ValueError, match="--storage sqlite:////none/x.db cannot be"):
        open_study("sqlite:////none/x.db", definition())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        tuning(tmp_path / "file" / "s").run()


def test_trials_share_the_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr("meshloom.launch.gpus.num_installed", lambda: 4)
    search = tuning(tmp_path, parallel=2)
    assert search.env_of(1)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in tuning(tmp_path, parallel=1).env_of(0)


def test_the_page_and_the_document(tmp_path):
    space = Space(
        (
            *LOSSES.dimensions,
            Dimension("kind", Choice(("'a<b'", "@x.Y()")), "space.gin:2"),
        )
    )
    search = tuning(tmp_path / "s", space, trials=6)
    search.run()
    lines = page.write(search)
    best = search.study().best_trial
    heading, first, *_ = lines[0].splitlines()
    assert heading.split() == ["trial", "loss", "steps", "time", "loss", "kind"]
    assert first.split()[0] == str(best.number)
    assert lines[1] == "6 trials: 6 finished"
    results = json.loads((search.folder / "tune.json").read_text())
    assert results["best"] == best.number and len(results["trials"]) == 6
    assert results["importance"]["loss"] > results["importance"]["kind"]
    html = (search.folder / "tune.html").read_text()
    assert html.count("<polyline") == 12  # a curve and a line per trial
    assert "a<b" not in html and "a&lt;b" in html
