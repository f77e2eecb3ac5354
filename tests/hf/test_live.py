"""The long form: models of ours in `transformers` and PEFT themselves.

It needs an interpreter with torch, transformers and peft: TRANSFORMERS_PYTHON.
"""

import json
import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from paths import ROOT
from test_adapters import exported
from test_lora import jit, random_params
from tiny_runs import main

from meshloom.sharding import Sharder
from meshloom.trainer.checkpoint.inspect import Stored
from meshloom.trainer.checkpoint.manager import Checkpoints
from meshloom.trainer.hf import documents, families
from meshloom.trainer.hf.exporting import export_model
from meshloom.trainer.program.state import State

SCRIPT = ROOT / "tests" / "golden" / "make_hf.py"
GOLDEN = ROOT / "tests" / "golden" / "hf"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
ADAPTED = ("gpt2", "qwen3")
TOKENS = np.random.default_rng(1).integers(0, 40, (1, 25))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def export_random(name: str, folder: pathlib.Path) -> np.ndarray:
    """Exports random weights of our own; returns their logits."""
    document = json.loads((GOLDEN / name / "config.json").read_text())
    family = families.find(document["model_type"], "config.json")
    model, _ = documents.read_model(
        document, family, "config.json", pad_vocab_to=64, compute_dtype="float32"
    )
    params = random_params(model)
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, State(np.int32(1), params, ()))
    checkpoints.close()
    export_model(
        Stored(checkpoints.folder, 1),
        model,
        folder / "model",
        family=family.model_type,
        file_bytes=10_000,
    )
    np.save(folder / "tokens.npy", TOKENS)
    tokens = TOKENS[:, :-1].astype(np.int32)
    logits = jit(model.logits, static_argnums=2)(params, tokens, Sharder())
    return np.asarray(logits)[..., : model.vocab_size]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns {name: (our logits, those of transformers)}, all from one process."""
    folder, ours = tmp_path_factory.mktemp("live"), {}
    for name in FAMILIES:
        (folder / name).mkdir()
        ours[name] = export_random(name, folder / name)
    for name in ADAPTED:
        own = folder / f"adapter-{name}"
        tokens, _, found = exported(name, own)
        ours[own.name] = np.asarray(found)[..., :40]
        shutil.copytree(GOLDEN / name, own / "model")
        np.save(own / "tokens.npy", np.pad(tokens, ((0, 0), (0, 1))))
    half, run = folder / "bfloat16", folder / "bfloat16" / "run"
    half.mkdir()
    assert main(["import", "hf", str(GOLDEN / "qwen3"), "--output", str(run)]) == 0
    flags = ["--output", str(half / "model"), "--dtype", "bfloat16"]
    assert main(["export", "hf", str(run), *flags]) == 0
    expected = np.load(GOLDEN / "qwen3" / "expected.npz")
    ours[half.name] = expected["logits"]
    np.save(half / "tokens.npy", expected["tokens"])
    python = os.environ.get("TRANSFORMERS_PYTHON")
    assert python, "set TRANSFORMERS_PYTHON to a python with torch and transformers"
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [python, str(SCRIPT), "run", str(folder)], check=True, timeout=600, env=env
    )
    return {
        name: (logits, np.load(folder / name / "found.npz")["logits"])
        for name, logits in ours.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_what_our_model_does(name, results):
    ours, theirs = results[name]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ADAPTED)
def test_peft_computes_what_our_adapters_do(name, results):
    ours, theirs = results[f"adapter-{name}"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_transformers_reads_bfloat16(results):
    ours, theirs = results["bfloat16"]
    np.testing.assert_allclose(ours, theirs, atol=0.2)
    assert np.abs(ours - theirs).max() > 1e-4  # they are rounded
