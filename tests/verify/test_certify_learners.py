"""Certificates of trainings between learners; the replay itself is a stand-in here."""

import json
from types import SimpleNamespace

import pytest
from tiny_runs import main, refused

from meshloom.trainer.record.run_folder import PACKAGES
from meshloom.trainer.verify import certify_learners, replay
from meshloom.trainer.verify.training_audit import TrainingAudit

VERSIONS = (*PACKAGES, "meshloom", "python", "platform", "device_kind", "xla_flags")


def part(learner: int, round: int, is_reused: bool = False) -> dict:
    return {"learner": learner, "round": round, "is_reused": is_reused}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a training of two learners that a replay has found to be right."""
    (tmp_path / "spec.json").write_text(
        json.dumps({"job": "x", "policy": {}, "config_digest": "c0ffee"})
    )
    ran_on = dict.fromkeys(VERSIONS, "1") | {"mesh": "data=2", "num_devices": 2}
    for number in range(2):
        folder = tmp_path / "learners" / str(number)
        folder.mkdir(parents=True)
        text = json.dumps(ran_on | {"num_processes": 1})
        (folder / "environment.json").write_text(text)
    write(tmp_path, [part(0, 1), part(1, 1)], [part(0, 2), part(1, 1, True)])
    found(monkeypatch)
    no_faults = SimpleNamespace(faults=[])
    monkeypatch.setattr(certify_learners, "audit", lambda folder: no_faults)
    sound(monkeypatch)
    return tmp_path


def sound(monkeypatch, *faults: str) -> None:
    """Makes the audit of the training find these faults."""
    found = TrainingAudit(4, 2, 3, [], [], 0, 3, list(faults))
    monkeypatch.setattr(certify_learners, "audit_training", lambda run: found)


def write(run, *commits) -> None:
    rows = [{"step": n, "contributions": parts} for n, parts in enumerate(commits, 1)]
    (run / "commits.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def found(monkeypatch, different=(), norms=()) -> None:
    verdict = replay.Verdict(2, 3, different, norms, 5)
    monkeypatch.setattr(replay, "replay", lambda run, log: verdict)
    monkeypatch.setattr(replay, "num_devices", lambda run: 8)  # those of this process


def certified(run, capsys, *flags) -> tuple[int, str, dict]:
    status = main(["certify", "--run", str(run), *flags])
    text = (run / certify_learners.FILE).read_text()
    return status, capsys.readouterr().out.splitlines()[-1], json.loads(text)


def test_a_replay_that_agrees_is_certified(run, capsys):
    copy = run / "copy.json"
    status, line, document = certified(run, capsys, "--json", str(copy))
    assert status == 0 and document["passed"]
    assert line.endswith("trajectory hold for 2 commits of 2 learners")
    assert json.loads(copy.read_text()) == document
    assert document["versions"] == dict.fromkeys(VERSIONS, "1")
    about = {"mesh": "data=2", "devices": 2, "processes": 1}
    assert document["learners"] == [{"learner": n, **about} for n in range(2)]
    assert document["data"]["contributions"] == 3  # a reused one is the same again


def test_each_level_can_fail(run, capsys, monkeypatch):
    found(monkeypatch, different=("a/b", "c"))
    status, line, document = certified(run, capsys)
    assert status == 1 and line.endswith(
        "state: another final digest of a/b and 1 more"
    )
    assert document["trajectory"]["passed"] and not document["passed"]
    found(monkeypatch, norms=(2,))
    status, line, _ = certified(run, capsys)
    assert status == 1
    assert line.endswith("trajectory: another gradient norm in commit 2")


def test_samples_that_count_twice_fail_the_data(run, capsys, monkeypatch):
    write(run, [part(0, 1)], [part(1, 1), part(0, 1)])
    status, line, _ = certified(run, capsys)
    assert status == 1 and "data: round 1 of learner 0 is in 2 commits" in line
    write(run, [part(0, 1)])
    sound(monkeypatch, "block 7 is in commit 1 and again in commit 2")
    _, line, _ = certified(run, capsys)
    assert "data: audit: block 7 is in commit 1 and again" in line
    sound(monkeypatch)
    faults = SimpleNamespace(faults=["step 3 has other samples"])
    monkeypatch.setattr(certify_learners, "audit", lambda folder: faults)
    _, line, _ = certified(run, capsys)
    assert "data: audit of learner 0: step 3 has other samples" in line


def test_flags_that_do_not_belong_together_are_refused(tmp_path, capfd):
    argv = ["certify", "--run", str(tmp_path)]
    assert "--drift is for --meshes" in refused(capfd, [*argv, "--drift", "0"])
    assert "--set is for --meshes" in refused(capfd, [*argv, "--set", "seed=1"])
    assert "is missing" in refused(capfd, argv)
