"""A save in the background: how it stalls training, what it reports, how it fails."""

import errno
import os
import threading
import types

import pytest
from test_manager import assert_equal, make_mesh, plan, trained
from tiny_runs import main, sets_of, train

from meshloom.trainer.checkpoint import manager
from meshloom.trainer.checkpoint.manager import Checkpoints, committed_steps
from meshloom.trainer.checkpoint.save_stall import Stall
from meshloom.trainer.record.failures import is_user_error
from meshloom.trainer.record.save_errors import SaveFailed
from meshloom.trainer.run import hooks


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=4, tensor=2)


class Gate:
    """Blocks orbax in the background just before it commits."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.open.set()
        monkeypatch.setattr(Checkpoints, "_before_commit", self._pass)

    def _pass(self):
        assert self.open.wait(60)


class Opening:
    """A running save that continues once it is waited for."""

    def __init__(self, running, gate):
        self._running, self._gate = running, gate

    def done(self):
        return self._running.done()

    def result(self):
        self._gate.open.set()
        return self._running.result(60)


class Events(list):
    def __call__(self, kind, **facts):
        self.append((kind, facts))

    def kinds(self):
        return [(kind, facts["step"]) for kind, facts in self]


def test_a_commit_is_reported_once_the_step_is_on_disk(tmp_path, mesh, monkeypatch):
    gate, events, seen = Gate(monkeypatch), Events(), []

    def event(kind, **facts):
        events(kind, **facts)
        seen.append(committed_steps(tmp_path))

    checkpoints = Checkpoints(tmp_path, event=event)
    gate.open.clear()
    checkpoints.save(1, trained(plan(mesh), mesh, 1))
    assert events.kinds() == [("save", 1)]
    gate.open.set()
    checkpoints.close()
    assert events.kinds() == [("save", 1), ("commit", 1)]
    assert seen == [[], [1]]
    parts = ["digests_s", "waited_s", "copy_s"]
    facts = events[0][1]
    assert facts.keys() == {"step", "stall_s", *parts}
    assert 0 < sum(facts[name] for name in parts) <= facts["stall_s"] + 1e-5


def test_a_running_save_is_waited_for(tmp_path, mesh, monkeypatch):
    gate, events = Gate(monkeypatch), Events()
    state = trained(plan(mesh), mesh, 1)
    checkpoints = Checkpoints(tmp_path, event=events)
    gate.open.clear()
    assert checkpoints.save(1, state).waited_for is None
    step, running = checkpoints._running
    checkpoints._running = (step, Opening(running, gate))
    stall = checkpoints.save(2, state)
    assert stall.waited_for == 1 and stall.waited_s > 0
    checkpoints.close()
    assert events.kinds() == [("save", 1), ("commit", 1), ("save", 2), ("commit", 2)]
    assert committed_steps(tmp_path) == [1, 2]


def fail_at_commit():
    raise OSError("the store is on strike")


def test_a_failure_in_the_background_is_raised_once_with_its_step(
    tmp_path, mesh, monkeypatch
):
    layout = plan(mesh)
    first = trained(layout, mesh, 1)
    gate, events = Gate(monkeypatch), Events()
    checkpoints = Checkpoints(tmp_path, keep=1, event=events)
    checkpoints.save(1, first)
    checkpoints.wait()
    monkeypatch.setattr(gate.open, "wait", lambda timeout: fail_at_commit())
    checkpoints.save(2, trained(layout, mesh, 2))
    with pytest.raises(SaveFailed) as error:
        checkpoints.save(3, trained(layout, mesh, 3))
    line = (
        f"the checkpoint of step 2 was not written to {tmp_path}: the store is on "
        "strike. The newest complete checkpoint there is of step 1. Fix the cause, "
        "then run the same command again to continue."
    )
    assert str(error.value) == line
    checkpoints.close()
    assert events.kinds() == [
        ("save", 1),
        ("commit", 1),
        ("save", 2),
        ("commit_failed", 2),
    ]
    assert events[-1][1]["reason"] == line
    again = Checkpoints(tmp_path)
    assert_equal(again.restore(1, layout, mesh)[0], first)
    again.close()


def test_a_failure_of_the_last_save_is_raised_at_the_end(tmp_path, mesh, monkeypatch):
    gate = Gate(monkeypatch)
    monkeypatch.setattr(gate.open, "wait", lambda timeout: fail_at_commit())
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, trained(plan(mesh), mesh, 7))
    with pytest.raises(
        SaveFailed, match="step 7 was not written .* There is no complete"
    ):
        checkpoints.close()


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_storage_that_does_not_answer_is_not_a_folder_that_is_gone(
    tmp_path, mesh, monkeypatch, code
):
    """When a save starts, and in the background; a restart may cure it."""
    state = trained(plan(mesh), mesh, 1)
    gate = Gate(monkeypatch)
    checkpoints = Checkpoints(tmp_path)
    gate.open.clear()
    checkpoints.save(1, state)

    def fail(path):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(manager, "os", types.SimpleNamespace(stat=fail))
    gate.open.set()
    for act in (checkpoints.wait, lambda: checkpoints.save(2, state)):
        with pytest.raises(SaveFailed) as error:
            act()
        assert error.value.errno == code and not is_user_error(error.value)
        assert os.strerror(code) in str(error.value)
        assert "cannot be listed" in str(error.value)
    checkpoints.close()


def test_long_stalls_and_the_first_wait_are_printed(tmp_path, monkeypatch, capfd):
    stalls = {
        1: Stall(0.3, 0.1, 0.0, 0.2),
        2: Stall(0.5, 0.1, 0.2, 0.2, waited_for=1),
        3: Stall(0.5, 0.1, 0.2, 0.2, waited_for=2),
        4: Stall(2.5, 0.25, 2.0, 0.25, waited_for=3),
    }
    save = Checkpoints.save

    def measured(self, step, *args, **kwargs):
        save(self, step, *args, **kwargs)
        return stalls[step]

    monkeypatch.setattr(hooks.Checkpoints, "save", measured)
    assert main([*train(tmp_path), *sets_of("save_every=1", "eval_batches=0")]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "stalled training" in line] == [
        "step 2  saving stalled training for 0.50 s (the save of step 1 was still "
        "running: waited 0.20 s; digests 0.10 s, copy 0.20 s)",
        "step 4  saving stalled training for 2.50 s (the save of step 3 was still "
        "running: waited 2.00 s; digests 0.25 s, copy 0.25 s)",
    ]
