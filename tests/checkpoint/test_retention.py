"""Which checkpoints are kept: the newest, every k-th step, the best by loss."""

import jax
import pytest
from test_manager import make_mesh, plan, trained
from tiny_runs import main, refused, sets_of, train

from meshloom.trainer.checkpoint import manager, manifest
from meshloom.trainer.checkpoint.manager import Checkpoints, committed_steps
from meshloom.trainer.record import metrics


@pytest.fixture(scope="module")
def state():
    mesh = make_mesh(fsdp=4, tensor=2)
    return trained(plan(mesh), mesh)


def save(folder, state, losses, **keep) -> list[int]:
    """Saves {step: loss or None} one after the other; returns the steps kept."""
    checkpoints = Checkpoints(folder, **keep)
    for step, loss in losses.items():
        numbered = state._replace(step=jax.numpy.int32(step))
        checkpoints.save(step, numbered, loss=loss)
    checkpoints.close()
    return committed_steps(folder)


def test_multiples_are_kept_beside_the_newest(tmp_path, state):
    steps = dict.fromkeys([2, 3, 6, 7, 8, 9, 10, 11])
    assert save(tmp_path, state, steps, keep=2, keep_every=3) == [3, 6, 9, 10, 11]


def test_the_best_are_kept_beside_the_newest(tmp_path, state):
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 3.0, 6: 6.0}
    assert save(tmp_path, state, losses, keep=1, keep_best=2) == [2, 4, 6]


def test_steps_without_a_finite_loss_do_not_count_for_best(tmp_path, state):
    """Also while there are fewer steps than keep_best."""
    losses = {1: None, 2: 3.0, 3: float("nan"), 4: None}
    assert save(tmp_path, state, losses, keep=1, keep_best=5) == [2, 4]


def test_the_best_are_known_after_a_restart(tmp_path, state):
    """Losses come from the manifests, even if keep_best was 0 before."""
    assert save(tmp_path, state, {1: 1.0, 2: 2.0, 3: 3.0}, keep=3) == [1, 2, 3]
    assert save(tmp_path, state, {4: 4.0, 5: 1.5}, keep=1, keep_best=2) == [1, 5]


def test_a_damaged_manifest_does_not_stop_a_run(tmp_path, state):
    save(tmp_path, state, {1: 1.0, 2: 2.0}, keep=2)
    (tmp_path / "1" / "manifest" / "metadata").write_text('{"for')
    events = []

    def event(kind, **facts):
        events.append((kind, facts["step"], facts.get("reason", "")))

    keep = {"keep": 1, "keep_best": 1, "event": event}
    assert save(tmp_path, state, {3: 3.0}, **keep) == [2, 3]
    ((_, step, reason),) = [each for each in events if each[0] == "loss_unknown"]
    assert step == 1 and f"checkpoint {tmp_path / '1'} cannot be read" in reason


def test_a_run_keeps_by_the_losses_of_its_evaluations(tmp_path):
    """Saved at 2, 4, ... 12; evaluated at 3, 6, 9 and 12, so 6 and 12 count."""
    flags = ["save_every=2", "eval_every=3", "keep_checkpoints=1", "keep_best=2"]
    flags += ["keep_every=5"]
    assert main([*train(tmp_path, "--steps", "12"), *sets_of(*flags)]) == 0
    folder = tmp_path / "checkpoints"
    assert committed_steps(folder) == [6, 10, 12]
    rows = {row["step"]: row["loss"] for row in metrics.read(tmp_path / "eval.jsonl")}
    assert manifest.read(folder, 6)[manifest.LOSS] == rows[6]
    assert manifest.LOSS not in manifest.read(folder, 10)
    # How many are kept may change.
    flags[2:] = ["keep_checkpoints=2", "keep_best=0", "keep_every=0"]
    assert main([*train(tmp_path, "--steps", "12"), *sets_of(*flags)]) == 0
    assert manager.latest_step(folder) == 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["keep_best=2", "eval_batches=0"],
            "keep_best is 2, but with eval_batches=0 there is no held-out loss to "
            "choose by. Set eval_batches, or keep_best=0.",
        ),
        (
            ["keep_every=2", "keep_checkpoints=None"],
            "keep_every and keep_best have no effect: keep_checkpoints=None keeps all. "
            "Set keep_checkpoints to a number, or leave them at 0.",
        ),
        (["keep_every=-1"], "keep_every must be >= 0, got -1"),
    ],
)
def test_settings_that_cannot_work(flags, message, tmp_path, capfd):
    assert message in refused(capfd, [*train(tmp_path), *sets_of(*flags)])
    assert not list(tmp_path.iterdir())
