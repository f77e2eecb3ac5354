"""Predictions of a trained model on files, sharded, and the files they end up in."""

import dataclasses
import io
import json
import pathlib

import jax
import jax.numpy as jnp
import npz_rows
import numpy as np
import pytest
from rich.console import Console

from meshloom.models import transformer
from meshloom.sharding import MeshSpec, Sharder, parse_plan
from meshloom.trainer import data
from meshloom.trainer.record import prediction_files
from meshloom.trainer.run import inputs as inputs_lib
from meshloom.trainer.run import predicting, trained
from meshloom.trainer.run.train import train

NUM = 61  # not a multiple of 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicts(npz_rows.Linear):
    def predict(self, params, batch, shard):
        logits = batch["x"] @ shard.weight(params["w"], ("embed", "norm"))
        return {"class": jnp.argmax(logits, -1), "logits": logits}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    path = npz_rows.write(folder.parent / "rows.npz", num_eval=NUM)
    config = npz_rows.config(path, model=Predicts(), num_steps=4)
    state = train(config, workdir=folder, console=Console(file=io.StringIO()))
    return folder, config, np.asarray(state.params["w"])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Returns a folder of two npz files, without labels, and their rows."""
    folder = tmp_path_factory.mktemp("rows")
    x = np.random.default_rng(1).normal(size=(NUM, 8)).astype(np.float32)
    (folder / "b").mkdir()
    np.savez(folder / "a.npz", x=x[:20])
    np.savez(folder / "b" / "c.npz", x=x[20:])
    return folder, x


def predicted(run, inputs, mesh="fsdp=8", config=None, **settings):
    folder, own, _ = run
    found = predicting.predictions(
        config or own,
        trained.find(folder),
        inputs,
        trained.make_mesh(mesh),
        **settings,
    )
    parts = list(found)
    return {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}


@pytest.mark.parametrize("mesh", ["data=1", "fsdp=8", "data=2,fsdp=4"])
def test_predictions_are_those_of_numpy(run, rows, mesh, monkeypatch):
    _, config, weights = run
    folder, x = rows
    inputs = inputs_lib.of_path(config, folder)
    restored = []
    real = trained.restore
    monkeypatch.setattr(
        trained, "restore", lambda *args: restored.append(real(*args)) or restored[0]
    )
    found = predicted(run, inputs, mesh)
    np.testing.assert_allclose(found["logits"], x @ weights, rtol=1e-5, atol=1e-6)
    assert found["class"].tolist() == (x @ weights).argmax(-1).tolist()
    (state,) = restored
    ways = {"data=1": 1, "fsdp=8": 8, "data=2,fsdp=4": 4}[mesh]
    assert state.params["w"].addressable_shards[0].data.size * ways == 32
    assert inputs.about(20) == {"file": "b/c.npz", "index": 0}
    assert inputs.about(19) == {"file": "a.npz", "index": 19}


def test_the_batch_size_changes_nothing(run, rows):
    inputs = inputs_lib.of_path(run[1], rows[0])
    small, large = (
        predicted(run, inputs, batch_size=size)["class"] for size in (1, 1000)
    )
    assert small.tolist() == large.tolist() and len(small) == NUM


def test_a_split_of_the_run(run):
    inputs = inputs_lib.of_split(run[1], "eval")
    with np.load(run[1].data.path) as file:
        expected = (file["eval_x"] @ run[2]).argmax(-1)
    assert predicted(run, inputs)["class"].tolist() == expected.tolist()


def refused(run, inputs, **settings) -> str:
    with pytest.raises(ValueError) as raised:
        predicted(run, inputs, **settings)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def with_model(run, model):
    return dataclasses.replace(run[1], model=model)


def test_a_model_without_predict_is_refused(run, rows):
    inputs = inputs_lib.of_path(run[1], rows[0])
    assert refused(run, inputs, config=with_model(run, npz_rows.Linear())) == (
        "model Linear makes no predictions: it has no method "
        "predict(params, batch, shard), which returns {name: array [B, ...]} for a "
        "batch of B rows. Add one (docs/predict.md)."
    )


def test_a_prediction_has_a_row_for_each_row(run, rows):
    class Wrong(Predicts):
        def predict(self, params, batch, shard):
            return {"mean": jnp.mean(batch["x"])}

    inputs = inputs_lib.of_path(run[1], rows[0])
    assert refused(run, inputs, config=with_model(run, Wrong())) == (
        "Wrong.predict returned {mean: a scalar} for a batch of 16 rows; expected "
        "{name: array [16, ...]}"
    )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"label": np.zeros(9, np.int32)}, "needs an array 'x' to predict. The inputs"),
        ({"x": np.zeros((9, 5), np.float32)}, "cannot predict on these inputs (dot_"),
        ({"y": np.zeros((9, 5), np.float32)}, "an array 'y', which the model does not"),
        ({"x": np.zeros((9, 8))}, "is float64, which jax would convert to float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(run, arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    inputs = inputs_lib.of_path(run[1], tmp_path / "a.npz")
    assert message in refused(run, inputs)


def test_files_that_cannot_be_read_are_refused(run, tmp_path):
    def message(path):
        with pytest.raises(ValueError) as raised:
            inputs_lib.of_path(run[1], path)
        return str(raised.value)

    assert message(tmp_path / "none").endswith(
        "does not exist. Name a file or a folder."
    )
    assert "has no npz file. Name one, or" in message(tmp_path)
    (tmp_path / "a.npz").write_text("no")
    assert "a.npz cannot be read as npz: " in message(tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 8)), label=np.zeros(2))
    assert "do not have the same number of rows" in message(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 8)))
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 7)))
    assert "b.npz has other arrays than" in message(tmp_path)
    np.savez(tmp_path / "b.npz", x=np.zeros((0, 8)))
    assert "has no rows to predict on" in message(tmp_path / "b.npz")


def test_a_source_may_open_its_own_files(run, tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Lines(npz_rows.Npz):
        def inputs(self, path):
            numbers = pathlib.Path(path).read_text().split()
            return [{"x": np.full(8, number, np.float32)} for number in numbers]

    (tmp_path / "rows.txt").write_text("1 -2 3")
    config = dataclasses.replace(run[1], data=Lines(path="unused"))
    inputs = inputs_lib.of_path(config, tmp_path / "rows.txt")
    logits = predicted(run, inputs, config=config)["logits"]
    expected = np.array([[1.0], [-2], [3]]) * run[2].sum(0)[None]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_text_is_scored_in_windows_of_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefg")
    (tmp_path / "b.txt").write_text("xyz")
    source = data.Text(path="unused", length=5)
    config: object = type("Config", (), {"data": source})()
    inputs = inputs_lib.of_path(config, tmp_path)  # type: ignore
    found = [inputs.about(i) for i in range(len(inputs))]
    assert found == [
        {"file": "a.txt", "start": 0, "tokens": 5},
        {"file": "a.txt", "start": 5, "tokens": 3},
        {"file": "b.txt", "start": 0, "tokens": 4},
    ]
    second = inputs.example(1)
    assert bytes(second["targets"][:2].tolist()) == b"fg"
    assert second["targets"][2] == 256 and second["weights"].tolist() == [1, 1, 1, 0, 0]
    assert inputs.example(0)["inputs"][0] == 256


def test_the_transformer_scores_rows_like_its_loss():
    model = transformer.Config(
        vocab_size=60,
        num_layers=1,
        d_model=32,
        num_heads=4,
        d_ff=64,
        max_length=16,
        compute_dtype="float32",
    )
    params = model.init(jax.random.key(0))
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 60, (8, 9)).astype(np.int32)
    weights = (draw.random((8, 8)) < 0.7).astype(np.float32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    mesh = MeshSpec(fsdp=2, tensor=4).make()
    rules = parse_plan("data+fsdp+tensor")
    sharded = jax.jit(lambda p: model.predict(p, batch, Sharder(mesh, rules)))(params)
    total, weight, _ = model.loss(params, batch, Sharder())
    rows = sharded["loss"] * weights.sum(-1)
    assert float(rows.sum()) == pytest.approx(float(total), rel=1e-5)
    logits = model.logits(params, batch["inputs"], Sharder())
    right = (np.asarray(logits).argmax(-1) == batch["targets"]) * weights
    np.testing.assert_allclose(sharded["accuracy"], right.sum(-1) / weights.sum(-1))
    assert weight == weights.sum()


ABOUT = [{"example": 0, "file": "a"}, {"example": 1, "file": "b"}]
ROWS = {"score": np.array([0.5, np.nan]), "pair": np.array([[1, 2], [3, 4]])}


def test_json_lines(tmp_path):
    path = tmp_path / "found.jsonl"
    with prediction_files.writing(path) as write:
        write(ABOUT, ROWS)
        assert not path.exists()
        write([{"example": 2, "file": "c"}], {k: x[:1] for k, x in ROWS.items()})
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found[1:] == [
        {"example": 1, "file": "b", "score": None, "pair": [3, 4]},
        {"example": 2, "file": "c", "score": 0.5, "pair": [1, 2]},
    ]


def test_npz(tmp_path):
    path = tmp_path / "found.npz"
    with prediction_files.writing(path) as write:
        write(ABOUT, ROWS)
        write(ABOUT, ROWS)
    with np.load(path) as found:
        assert found["file"].tolist() == ["a", "b", "a", "b"]
        assert found["pair"].shape == (4, 2) and np.isnan(found["score"][3])


@pytest.mark.parametrize("name", ["found.npz", "found.jsonl"])
def test_a_file_is_complete_or_as_it_was(tmp_path, name):
    path = tmp_path / name
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), prediction_files.writing(path) as write:
        write(ABOUT, ROWS)
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == [name] and path.read_text() == "old"
    with (
        pytest.raises(ValueError, match="returned an array 'file', a name that says"),
        prediction_files.writing(path) as write,
    ):
        write(ABOUT, ROWS | {"file": np.zeros(2)})
