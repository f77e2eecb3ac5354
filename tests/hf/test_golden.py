"""Tiny models of every family against what `transformers` and PyTorch computed.

tests/golden/make_hf.py made the folders; these tests need neither package.
"""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from paths import ROOT
from safetensors.numpy import load_file

from meshloom.sharding import Sharder, parse_plan
from meshloom.trainer.config import files as config_files
from meshloom.trainer.hf.exporting import export_model
from meshloom.trainer.hf.importing import import_model, open_source
from meshloom.trainer.program.build import build
from meshloom.trainer.program.computation import layout_of
from meshloom.trainer.program.optimizers import AdamW
from meshloom.trainer.run import trained
from meshloom.trainer.run.train import Config

GOLDEN = ROOT / "tests" / "golden" / "hf"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
MESH = "fsdp=2,tensor=2"
# Most of the time here is compilation; the programs run only briefly.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def imported(name: str, folder: pathlib.Path):
    """Returns config and restored state of an imported model, on a mesh."""
    mesh = trained.make_mesh(MESH)
    run = folder / name
    import_model(GOLDEN / name, run, mesh)
    config = config_files.load([str(run / "config.gin")], root=Config).config
    layout, rules = layout_of(config, mesh)
    state = trained.restore(trained.find(run), layout, mesh)
    return config, state, Sharder(mesh, rules)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("imported")


def expected(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / name / "expected.npz"))


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {k: x for file in files for k, x in load_file(file).items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_generation(name, folder):
    """On a mesh that shards parameters and rows, and one position at a time."""
    config, state, shard = imported(name, folder)
    model, found = config.model, expected(name)
    assert model.padded_vocab == 128 and model.vocab_size == 40
    matrices = [x for x in jax.tree.leaves(state.params) if x.ndim > 2]
    assert all(not x.sharding.is_fully_replicated for x in matrices)
    tokens = found["tokens"][:, :-1].astype(np.int32).repeat(2, axis=0)
    logits_of = jit(functools.partial(model.logits, shard=shard))
    logits = np.asarray(logits_of(state.params, tokens))
    np.testing.assert_allclose(
        logits[..., : model.vocab_size],
        found["logits"].repeat(2, 0),
        rtol=1e-5,
        atol=1e-5,
    )
    assert (logits[..., model.vocab_size :] == -1e9).all()
    given = 18  # the others are chosen, greedily
    generate = functools.partial(
        *(model.generate,),
        num_tokens=tokens.shape[1] - given,
        temperature=0.0,
        shard=Sharder(),
    )
    params = jax.device_get(state.params)
    new = jit(generate)(params, tokens[:, :given], key=jax.random.key(0))
    for i in range(given, tokens.shape[1]):
        tokens[:, i] = np.argmax(logits_of(state.params, tokens)[:, i - 1], axis=-1)
    np.testing.assert_array_equal(new, tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_trip_changes_no_byte(name, folder, tmp_path):
    config, _, _ = imported(name, folder)
    output = tmp_path / "out"
    limit = 8000 if name == "qwen3" else 2**30
    lines = export_model(
        trained.find(folder / name), config.model, output, file_bytes=limit
    )
    before, after = tensors(GOLDEN / name), tensors(output)
    assert before.keys() == after.keys() and f"{len(before)} tensors" in lines[0]
    for key, x in before.items():
        assert (x.dtype, x.shape) == (after[key].dtype, after[key].shape), key
        assert x.tobytes() == after[key].tobytes(), key
    old, new = (
        json.loads((f / "config.json").read_text()) for f in (GOLDEN / name, output)
    )
    assert old["model_type"] == new["model_type"]
    again = open_source(output, dtype=None, pad_vocab_to=128)
    again.tensors.close()
    assert again.model == config.model
    files = list(output.glob("*.safetensors"))
    assert (len(files) > 1) == (name == "qwen3")
    assert all(f.stat().st_size < limit + 2000 for f in files)


def slow(names, always):
    """The families `always`; the others in the long form only."""
    return [
        pytest.param(n, marks=() if n in always else pytest.mark.slow) for n in names
    ]


@pytest.mark.parametrize("name", slow(FAMILIES, ("llama3", "gpt2")))
def test_losses_of_training_steps(name, folder):
    config, state, _ = imported(name, folder)
    mesh, found = trained.make_mesh(MESH), expected(name)
    tokens = found["tokens"].astype(np.int32)
    # Two equal rows, which the mesh can shard, have the loss of one.
    inputs, targets = (x.repeat(2, axis=0) for x in (tokens[:, :-1], tokens[:, 1:]))
    batch = {
        "inputs": inputs,
        "targets": targets,
        "weights": np.ones(inputs.shape, np.float32),
    }
    program = build(
        config.model,
        AdamW(weight_decay=0.0),
        mesh,
        parse_plan("data+fsdp+tensor"),
        batch,
        learning_rate=1e-2,
        donate=False,
    )
    state = program.layout.create_from(state.params, {}, mesh)
    batch = jax.device_put(batch, program.batch_shardings)
    losses = []
    for _ in found["losses"]:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, found["losses"], rtol=1e-4)
    assert losses[-1] < losses[0] - 0.1
