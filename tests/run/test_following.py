"""Runs that follow a folder: new files, restarts, published weights, and errors."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from growing_folder import Adds, config, history, write
from paths import ROOT
from rich.console import Console

from meshloom.sharding import MeshSpec
from meshloom.trainer.checkpoint.manager import committed_steps
from meshloom.trainer.job.preemption import Preempted
from meshloom.trainer.record import ledger, ledger_audit, published
from meshloom.trainer.record.published import Published
from meshloom.trainer.run import following, train, trained
from meshloom.trainer.run.publishing import Publish

FSDP = MeshSpec(data=2, fsdp=4)


def run(config, folder, **settings) -> str:
    console = Console(file=io.StringIO(), width=300)
    train.train(config, workdir=folder, console=console, **settings)
    return console.file.getvalue()  # type: ignore


def events(folder: Path, kind: str) -> list[dict]:
    rows = ledger.Ledger(folder, is_writer=False).read()
    return [row for row in rows if row["event"] == kind]


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run that has followed two files, and its output."""
    root = tmp_path_factory.mktemp("followed")
    write(root / "data", "m.npz", 100)
    adds = Adds(root / "data", [(3, "a.npz", 60), (8, "z.npz", 70)])
    output = run(config(root / "data", mesh=FSDP), root / "run", hooks=[adds])
    return root, output


def test_new_files_follow_and_every_sample_is_counted(followed):
    root, output = followed
    parts = json.loads((root / "run" / "data.json").read_text())["parts"]
    assert [part["files"] for part in parts] == [["m.npz"], ["a.npz"], ["z.npz"]]
    ends = [part["part"][2] for part in parts]
    assert [part["part"][:2] for part in parts] == [
        [0, 0],
        [ends[0]] * 2,
        [ends[1]] * 2,
    ]
    found = ledger_audit.audit(root / "run")
    assert found.faults == [] and len(found.history) == ends[2] // 16
    assert "each sample contributed to exactly one update of its epoch" in str(found)
    assert "waiting for new data" in output and "1 new file with" in output
    assert "no new data for 1.5 s" in output


def test_the_first_part_has_the_order_of_a_run_that_does_not_follow(followed, tmp_path):
    root, _ = followed
    write(tmp_path / "data", "m.npz", 100)
    steps = len(history(root / "run"))
    plain = config(tmp_path / "data", follow=False, follow_seconds=0.0, num_steps=5)
    run(plain, tmp_path / "run")
    same = {k: v for k, v in history(root / "run").items() if k <= 5}
    assert history(tmp_path / "run") == same and steps > 10


def test_another_mesh_reads_the_same(followed, tmp_path):
    root, _ = followed
    write(tmp_path / "data", "m.npz", 100)
    adds = Adds(tmp_path / "data", [(3, "a.npz", 60), (8, "z.npz", 70)])
    other = config(tmp_path / "data", mesh=MeshSpec(data=8))
    run(other, tmp_path / "run", hooks=[adds])
    assert history(tmp_path / "run") == history(root / "run")


def test_seconds_to_the_first_update_and_to_published_weights_are_recorded(followed):
    root, output = followed
    grown, first = events(root / "run", "grown"), events(root / "run", "first_update")
    shown = events(root / "run", "published")
    assert len(grown) == len(first) == len(shown) == 2
    for part, update, weights in zip(grown, first, shown, strict=True):
        assert update["step"] == part["part"][0] // 16 + 1
        assert 0 < update["seconds"] < weights["seconds"] < 120
        assert weights["step"] >= update["step"]
    assert "first update with 1 new file, " in output
    newest = published.read(root / "run")
    assert newest and newest.step == committed_steps(root / "run" / "checkpoints")[-1]
    assert (root / "run" / newest.checkpoint).is_dir()


def test_the_page_reads_published_weights(followed, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "follower").symlink_to(followed[0] / "run")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "growing.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(code, {})
    assert re.fullmatch(r"(\d+) checkpoints/\1\n", capsys.readouterr().out)


def test_a_run_may_be_continued_with_files_that_were_added_after_it(tmp_path):
    data, folder = tmp_path / "data", tmp_path / "run"
    write(data, "m.npz", 100)
    plain = config(data, follow=False, follow_seconds=0.0, num_steps=8)
    run(plain, folder)  # one epoch and a half
    write(data, "a.npz", 60)
    with pytest.raises(ValueError, match="added: a.npz"):
        run(config(data, follow=False, follow_seconds=0.0), folder)
    run(config(data), folder)
    (grown,) = events(folder, "grown")
    assert grown["part"][0] == 8 * 16
    found = ledger_audit.audit(folder)
    assert found.faults == [] and len(found.history) > 8
    # Without --follow the last part is read again, and new files are refused.
    steps = len(found.history) + 4
    run(config(data, follow=False, follow_seconds=0.0, num_steps=steps), folder)
    found = ledger_audit.audit(folder)
    assert found.faults == [] and len(found.history) == steps
    write(data, "b.npz", 60)
    with pytest.raises(ValueError, match="grown by 1 file, added: b.npz. Pass"):
        run(config(data, follow=False, follow_seconds=0.0), folder)
    (data / "m.npz").rename(tmp_path / "gone.npz")
    with pytest.raises(ValueError, match="'m.npz', which this run has been trained on"):
        run(config(data), folder)


def test_a_new_file_that_does_not_fit_ends_the_run_in_one_line(tmp_path):
    data, folder = tmp_path / "data", tmp_path / "run"
    write(data, "m.npz", 40)
    other = np.zeros((40, 3), np.float32), np.zeros(40, np.int32)
    np.savez(tmp_path / "odd.npz", x=other[0], label=other[1])

    def add(step, state):
        (tmp_path / "odd.npz").rename(data / "odd.npz")

    add.every = 0
    with pytest.raises(ValueError, match=r"odd.npz': 'x' is float32\[3\]") as caught:
        run(config(data), folder, hooks=[add])
    assert "\n" not in str(caught.value)
    (data / "odd.npz").unlink()
    write(data, "a.npz", 40)
    run(config(data), folder)
    assert [row["files"] for row in events(folder, "grown")] == [1]
    assert ledger_audit.audit(folder).faults == []


def test_a_run_that_waits_can_be_stopped_and_has_saved(tmp_path):
    write(tmp_path / "data", "m.npz", 40)
    asked: list[int] = []

    def should_stop(step: int) -> bool:
        asked.append(step)
        return len(asked) > 3

    with pytest.raises(Preempted, match="saved at step 2"):
        settings = {"should_stop": should_stop}
        run(config(tmp_path / "data", follow_seconds=0.0), tmp_path / "run", **settings)
    assert asked == [1, 2, 3, 4]
    assert committed_steps(tmp_path / "run" / "checkpoints") == [2]


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"stop_patience": 2, "eval_every": 4}, "stop_patience=2 would end a run"),
        ({"follow_seconds": -1.0}, "must be >= 0, got -1.0 and 0.0"),
        ({"follow_passes": 0}, "follow_passes must be >= 1"),
        ({"keep_checkpoints": 1}, "keep_checkpoints=1 would remove published"),
    ],
)
def test_settings_that_exclude_following_are_one_line(settings, pattern):
    with pytest.raises(ValueError, match=pattern) as caught:
        config(Path("data"), **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, pattern",
    [
        ({}, "follow_seconds=1.5 has no effect without follow; pass"),
        (
            {"follow_seconds": 0.0, "follow_passes": 3},
            "follow_passes=3 has no effect without follow; pass --follow, or leave it "
            "at 1",
        ),
    ],
)
def test_settings_that_need_following_are_not_ignored(settings, pattern, tmp_path):
    given = config(tmp_path, follow=False, **settings)
    with pytest.raises(ValueError, match=pattern):
        following.source_of(given, tmp_path / "run")


def test_each_part_is_read_as_often_as_asked(tmp_path):
    data, folder = tmp_path / "data", tmp_path / "run"
    write(data, "m.npz", 40)
    adds = Adds(data, [(2, "a.npz", 40)])
    run(config(data, follow_passes=2), folder, hooks=[adds])
    (grown,) = events(folder, "grown")
    start, first, stop = grown["part"]
    assert start == 2 * first
    assert len(ledger_audit.audit(folder).history) == 2 * stop // 16


class Saves:
    """Stands for the hook that saves."""

    def __init__(self):
        self.steps, self.last_step = [], None

    def __call__(self, step, state):
        self.steps.append(step)
        self.last_step = step


class Alone:
    def consult(self, what, report, judge):
        return judge([report])


def test_weights_are_published_by_steps_and_by_seconds():
    now = [0.0]

    def steps(**settings) -> list[int]:
        save, now[0] = Saves(), 0.0
        hook = Publish(save, Alone(), clock=lambda: now[0], **settings)  # type: ignore
        for step in range(1, 31):
            now[0] += 1.0
            if step % hook.every == 0:
                hook(step, None)  # type: ignore
        return save.steps

    settings = {"every_steps": 0, "every_seconds": 0.0, "look_every": 5}
    assert steps(**settings | {"every_steps": 10}) == [10, 20, 30]
    assert steps(**settings | {"every_seconds": 7.0}) == [10, 20, 30]
    both = settings | {"every_steps": 12, "every_seconds": 9.0}
    assert steps(**both) == [10, 12, 24]


def test_published_weights_follow_the_commits(tmp_path):
    write(tmp_path / "data", "m.npz", 100)
    plain = {"follow": False, "follow_seconds": 0.0, "num_steps": 6}
    run(config(tmp_path / "data", publish_every=2, **plain), tmp_path / "run")
    assert committed_steps(tmp_path / "run" / "checkpoints") == [2, 4, 6]
    newest = published.read(tmp_path / "run")
    assert newest is not None and newest.step == 6
    published.withdraw_after(tmp_path / "run", 6)
    assert published.read(tmp_path / "run") == newest
    published.withdraw_after(tmp_path / "run", 5)
    assert published.read(tmp_path / "run") is None
    published.write(tmp_path, Published(3, "checkpoints/3", 1.0))
    assert published.read(tmp_path) == Published(3, "checkpoints/3", 1.0)
    (tmp_path / published.FILE).write_text("{")
    with pytest.raises(ValueError, match="does not name a checkpoint"):
        published.read(tmp_path)


def test_commands_use_published_weights_and_says_if_they_are_gone(tmp_path, capsys):
    assert trained._newest(tmp_path, [3, 6]) == 6
    published.write(tmp_path, Published(3, "checkpoints/3", 1.0))
    assert trained._newest(tmp_path, [3, 6]) == 3
    assert capsys.readouterr().err == ""
    assert trained._newest(tmp_path, [6, 9]) == 9
    assert "names step 3, which is gone; using step 9" in capsys.readouterr().err


def test_a_file_that_is_still_written_is_not_taken_up(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "SETTLE_SECONDS", 0.2)
    write(tmp_path, "m.npz", 40)
    source = config(tmp_path).data

    class Fake:
        class prepared:
            config = config(tmp_path)
            identity_parts = [{"files": ["m.npz"]}]
            train_data = source.open("train")

    watch = following._Watch(Fake)  # type: ignore
    assert watch.look(0.0) == []
    write(tmp_path, "a.npz", 40)
    assert watch.look(0.0) == []  # seen for the first time
    with open(tmp_path / "a.npz", "ab") as file:
        file.write(b"more")
    watch.look(0.0)
    assert watch._seen["a.npz"][0] == (tmp_path / "a.npz").stat().st_size
    assert [x.name for x in watch.look(5.0)] == ["a.npz"]
