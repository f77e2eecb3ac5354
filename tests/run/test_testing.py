"""A trained model on data it has not seen: scores, intervals, overlap, refusals."""

import dataclasses
import io
import json
import math
import shutil

import jax
import npz_rows
import numpy as np
import pytest
from rich.console import Console
from test_evaluation import Unweighted, expected

from meshloom.trainer import data
from meshloom.trainer.checkpoint import manifest
from meshloom.trainer.record.failures import CorruptCheckpoint
from meshloom.trainer.run import bootstrap, overlap, testing, trained
from meshloom.trainer.run.train import train

NUM = 333  # not a multiple of 8: the last batch is padded


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder and config of a run of 8 steps, saved at 4 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    path = npz_rows.write(folder.parent / "rows.npz", num_eval=NUM)
    config = npz_rows.config(path)
    console = Console(file=io.StringIO())
    state = train(config, workdir=folder, console=console)
    return folder, config, jax.device_get(state.params)


def scores(run, *, config=None, changed=None, step="newest", mesh="fsdp=8", **settings):
    folder, own, _ = run
    config = config or own
    return testing.run_test(
        config,
        changed or config,
        folder,
        trained.find(folder, step),
        split=settings.pop("split", "test"),
        mesh=trained.make_mesh(mesh),
        **settings,
    )


def refused(run, error=ValueError, **settings) -> str:
    with pytest.raises(error) as raised:
        scores(run, **settings)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=8", "data=2,fsdp=4"])
def test_scores_are_those_of_numpy(run, mesh, monkeypatch):
    folder, config, params = run
    restored = []

    def restore(*args):
        restored.append(real(*args))
        return restored[0]

    real = trained.restore
    monkeypatch.setattr(trained, "restore", restore)
    done = []
    found = scores(run, mesh=mesh, progress=lambda *counts: done.append(counts))
    loss, accuracy = expected(params, config.data.path, "test")
    assert found.metrics == {
        "loss": pytest.approx(loss, rel=1e-6),
        "accuracy": pytest.approx(accuracy, rel=1e-6),
    }
    weight = restored[0].params["w"]
    ways = {"fsdp=8": 8, "data=8": 1, "data=2,fsdp=4": 4}[mesh]
    assert len(weight.sharding.device_set) == 8
    assert weight.addressable_shards[0].data.size * ways == weight.size
    # 333 examples are 41 groups of 8 and one of 5.
    assert (found.num_groups, found.group_size, found.num_examples) == (42, 8, NUM)
    assert done[-1] == (42, 42)
    for name, value in found.metrics.items():
        low, high = found.intervals[name]  # type: ignore
        assert low < value < high
    assert found.found == overlap.Overlap("examples", (NUM, 96))


def test_the_result_as_json(run):
    folder, _, _ = run
    found = scores(run).to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == json.loads(
        json.dumps(found)
    )
    assert (found["step"], found["split"], found["examples"]) == (8, "test", NUM)
    assert found["mesh"] == {"fsdp": 8}
    assert found["overlap"] == {
        "unit": "examples",
        "in_both": 0,
        "of": NUM,
        "train": 96,
    }
    stored = trained.find(folder)
    assert found["state"] == manifest.state_digest(stored.manifest())
    assert len(found["data"]["digest"]) == 64


def test_a_metric_that_is_not_finite_is_null(run):
    path = run[0].parent / "nan.npz"
    x = np.ones((NUM, npz_rows.NUM_FEATURES), np.float32)
    x[7] = np.nan
    changed = with_data(run[1], npz_rows.write(path, num_eval=NUM, test_x=x))
    found = scores(run, changed=changed, split="test").to_json()
    assert found["metrics"]["loss"] == {"value": None, "interval": None}
    assert found["metrics"]["accuracy"]["value"] is not None


def with_data(config, path):
    return dataclasses.replace(config, data=npz_rows.Npz(path=path))


def test_examples_of_the_training_split_are_refused(run):
    folder, config, _ = run
    with np.load(config.data.path) as file:
        x, label = file["test_x"].copy(), file["test_label"].copy()
        x[[3, 9]], label[[3, 9]] = file["train_x"][[5, 6]], file["train_label"][[5, 6]]
    path = npz_rows.write(
        folder.parent / "leaked.npz", num_eval=NUM, test_x=x, test_label=label
    )
    changed = with_data(config, path)
    assert refused(run, changed=changed) == (
        "the test split overlaps the training split: 2 of its 333 examples are among "
        "the 96 of the training split, such as example 3, which is example 5 there. "
        "Test on other data (--set data.NAME=VALUE, or another --split), or pass "
        "--no-overlap-check for scores that include what was learned by heart."
    )
    found = scores(run, changed=changed, check_overlap=False)
    assert found.found is None and found.num_examples == NUM


def test_equal_documents_are_found_under_any_name(tmp_path):
    for split, texts in {
        "train": {"a": "one thing " * 9, "b": "another " * 9, "c": "a third " * 9},
        "test": {"x": "something else " * 9, "y": "another " * 9},
    }.items():
        (tmp_path / split).mkdir()
        for name, text in texts.items():
            (tmp_path / split / f"{name}.txt").write_text(text)
    source = data.Text(
        path=str(tmp_path / "train"),
        test_path=str(tmp_path / "test"),
        length=16,
        holdout=0.0,
    )
    train, test = source.open("train"), source.open("test")
    found = overlap.find(train, test, print)
    assert found == overlap.Overlap("documents", (2, 3), 1, ("y.txt", "b.txt"))
    (tmp_path / "test" / "y.txt").write_text("another " * 9 + ".")
    found = overlap.find(train, source.open("test"), print)
    assert found == overlap.Overlap("documents", (2, 3))


def test_splits_of_one_text_do_not_overlap(tmp_path):
    (tmp_path / "one.txt").write_text(" ".join(map(str, range(999))))
    source = data.Text(path=str(tmp_path / "one.txt"), length=16, holdout=0.2)
    found = overlap.find(source.open("train"), source.open("eval"), print)
    assert found == overlap.Overlap("documents", (1, 1))


def test_training_data_that_changed_is_refused(run):
    folder, config, _ = run
    path = folder.parent / "other.npz"
    x = np.zeros((96, npz_rows.NUM_FEATURES), np.float32)
    other = with_data(config, npz_rows.write(path, num_eval=NUM, train_x=x))
    message = refused(run, config=other)
    assert (
        f"the data is not what run folder {folder} was trained on (split 'train'"
        in (message)
    )
    assert message.endswith(
        "or pass --no-overlap-check to test without comparing with it"
    )
    assert scores(run, config=other, check_overlap=False).num_examples == NUM


def test_held_out_data_that_changed_is_refused_unless_it_was_named(run):
    folder, config, _ = run
    x = np.zeros((NUM, npz_rows.NUM_FEATURES), np.float32)
    path = npz_rows.write(folder.parent / "new.npz", num_eval=NUM, eval_x=x)
    other = with_data(config, path)
    assert refused(run, config=other, split="eval").endswith(
        "Restore it, or name the data to test on with --set data.NAME=VALUE"
    )
    assert scores(run, changed=other, split="eval").num_examples == NUM


def test_data_that_moved_is_recognized(run):
    folder, config, _ = run
    moved = folder.parent / "moved.npz"
    shutil.copy(config.data.path, moved)
    gone = with_data(config, str(folder.parent / "gone.npz"))
    found = scores(run, config=gone, changed=with_data(config, str(moved)))
    assert found.found == overlap.Overlap("examples", (NUM, 96))


def test_which_step(run, tmp_path):
    folder, _, _ = run
    losses = {
        step: manifest.read(folder / "checkpoints", step)[manifest.LOSS]
        for step in (4, 8)
    }
    best = min(losses, key=lambda step: losses[step])
    assert trained.find(folder, "best").step == best
    assert trained.find(folder).step == 8
    assert trained.find(folder, "4").step == 4
    with pytest.raises(ValueError, match="--step 'last': expected newest, best or the"):
        trained.find(folder, "last")
    with pytest.raises(ValueError, match="no checkpoint of step 5; it has 4, 8. Pass"):
        trained.find(folder, "5")
    with pytest.raises(ValueError, match="does not contain a trained model"):
        trained.find(tmp_path)
    unmeasured = tmp_path / "run"
    shutil.copytree(folder, unmeasured)
    for step in (4, 8):
        path = unmeasured / "checkpoints" / str(step) / manifest.ITEM / "metadata"
        document = json.loads(path.read_text())
        del document[manifest.LOSS]
        path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="has a held-out loss.*or one of 4, 8"):
        trained.find(unmeasured, "best")


def tear_the_arrays(step):
    (step / "state" / "_METADATA").write_text("{")


def change_a_digest(step):
    path = step / manifest.ITEM / "metadata"
    document = json.loads(path.read_text())
    document["arrays"]["params/w"]["digest"] = "0" * 16
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (tear_the_arrays, "cannot be read: "),
        (
            change_a_digest,
            "is not what was saved: the digests of 1 arrays differ, first params/w",
        ),
    ],
)
def test_a_corrupt_checkpoint_is_refused(run, damage, message, tmp_path):
    folder, config, params = run
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    damage(copy / "checkpoints" / "8")
    found = refused((copy, config, params), error=CorruptCheckpoint)
    assert f"checkpoint {copy / 'checkpoints' / '8'} {message}" in found


def test_a_model_that_was_changed_is_refused(run):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Renamed(npz_rows.Linear):
        def init(self, key):
            return {"v": super().init(key)["w"]}

        def axes(self):
            return {"v": ("embed", "norm")}

        def loss(self, params, batch, shard):
            return super().loss({"w": params["v"]}, batch, shard)

    config = dataclasses.replace(run[1], model=Renamed())
    assert "does not fit the config of its run folder, in 2 arrays" in refused(
        run, config=config
    )


def test_a_mesh_may_use_some_of_the_devices():
    assert trained.make_mesh("data=2,fsdp=2").size == 4
    assert trained.make_mesh("data=2,fsdp=-1").size == 8
    with pytest.raises(ValueError, match="needs 16 devices, but there are 8"):
        trained.make_mesh("data=16")


def test_a_pipeline_is_refused(run):
    assert refused(run, mesh="fsdp=4,pipe=2").startswith("--mesh pipe=2: meshloom test")


def test_few_examples_have_no_interval(run):
    path = npz_rows.write(run[0].parent / "few.npz", num_eval=152)
    found = scores(run, changed=with_data(run[1], path))
    assert found.intervals == {}
    assert found.describe_intervals() == (
        "No confidence intervals: 152 examples are only 19 groups of 8, and a "
        "bootstrap needs 20"
    )


def test_without_weights_all_batches_are_full(run):
    config = dataclasses.replace(run[1], model=Unweighted())
    # Its training data has no weights either, so it is not compared.
    message = refused(run, config=config, check_overlap=False)
    assert "333 examples, which are not a multiple of the 8 shards" in message
    found = scores(run, config=config, check_overlap=False, mesh="data=1")
    assert (found.num_groups, found.group_size) == (167, 2)
    loss, _ = expected(run[2], config.data.path, "test")
    assert found.metrics["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("examples", "most", "multiple", "can_pad", "rows"),
    [
        (10_000, 64, 1, True, 50),  # 200 batches
        (1_000_000, 64, 8, True, 64),  # no larger than a batch of the run
        (1_000_000, 60, 8, True, 64),
        (100, 64, 1, True, 1),
        (300, 64, 1, False, 2),
        (303, 64, 1, False, 1),
        (1000, 64, 8, False, 8),
    ],
)
def test_rows_of_a_batch(examples, most, multiple, can_pad, rows):
    assert testing._rows(examples, most, multiple, can_pad) == rows


def test_many_batches_are_grouped():
    rows = [{"loss": float(i), "weight": 1.0} for i in range(450)]
    groups, size = testing._grouped(rows, 8)
    assert (len(groups), size) == (150, 24)
    assert groups[1] == {"loss": 12.0, "weight": 3.0}


def test_intervals_are_those_of_the_normal_distribution():
    draw = np.random.default_rng(1)
    values = draw.normal(2.0, 1.0, 200)
    groups = [{"loss": value, "weight": 1.0} for value in values]
    found = bootstrap.intervals(groups, lambda s: {"loss": s["loss"] / s["weight"]})
    low, high = found["loss"]  # type: ignore
    half = 1.96 * values.std() / math.sqrt(200)
    assert low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.15 * half)
    assert found == bootstrap.intervals(
        groups, lambda s: {"loss": s["loss"] / s["weight"]}
    )
    with pytest.raises(ValueError, match="needs >= 20 groups of examples, got 19"):
        bootstrap.intervals(groups[:19], lambda s: s)
