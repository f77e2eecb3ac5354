"""Adapters of an imported model: trained alone, generated with, exported for PEFT."""

import json
import shutil

import jax
import numpy as np
import pytest
from paths import ROOT
from safetensors.numpy import load_file, save_file
from test_lora import jit, random_params
from tiny_runs import main, refused, sets_of
from tokenizers import Tokenizer, models, pre_tokenizers

from meshloom.models import lora
from meshloom.models.adapters import WEIGHTS, Adapters
from meshloom.sharding import Sharder
from meshloom.trainer.checkpoint.inspect import Stored
from meshloom.trainer.checkpoint.manager import Checkpoints
from meshloom.trainer.hf.importing import open_source
from meshloom.trainer.hf.peft import export_adapter
from meshloom.trainer.hf.streaming import read_params
from meshloom.trainer.program.state import State
from meshloom.trainer.run import trained

GOLDEN = ROOT / "tests" / "golden" / "hf"
DATA = ("data=@sources.Synthetic()", "data.vocab_size=40", "data.length=16")
SMALL = ("num_steps=3", "batch_size=8", "eval_batches=0", "check_replicas_every=0")


def logits_and_params(folder, tokens):
    """Returns the logits of a folder of transformers, its model and parameters."""
    source = open_source(folder, dtype=None, pad_vocab_to=8)
    mesh = trained.make_mesh("fsdp=1")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(source.model.init, jax.random.key(0)),
    )
    params = read_params(source.tensors, source.pieces, placed)
    source.tensors.close()
    logits = jit(source.model.logits, static_argnums=2)(params, tokens, Sharder())
    return logits, source.model, params


def exported(name, folder):
    """Exports random adapters; returns tokens and the logits with and without them."""
    tokens = np.load(GOLDEN / name / "expected.npz")["tokens"][:, :-1].astype(np.int32)
    before, base, variables = logits_and_params(GOLDEN / name, tokens)
    weights = tuple(x for x in WEIGHTS if x != "gate" or base.mlp == "swiglu")
    model = lora.Config(base=base, adapters=Adapters(rank=2, weights=weights))
    params = random_params(model)
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(1, State(np.int32(1), params, (), variables))
    checkpoints.close()
    stored = Stored(checkpoints.folder, 1)
    export_adapter(stored, model, folder / "adapter", base=str(GOLDEN / name))
    found = jit(model.logits, static_argnums=2)(
        params, tokens, Sharder(), variables=variables
    )
    return tokens, before, found


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_the_exported_adapter_is_what_was_trained(name, tmp_path):
    """PEFT adds lora_B lora_A alpha / rank to a weight; so does this test."""
    tokens, before, expected = exported(name, tmp_path)
    adapter = tmp_path / "adapter"
    about = json.loads((adapter / "adapter_config.json").read_text())
    found = load_file(adapter / "adapter_model.safetensors")
    files = sorted((GOLDEN / name).glob("*.safetensors"))
    weights = {k: x for file in files for k, x in load_file(file).items()}
    scale, modules = about["lora_alpha"] / about["r"], 0
    for key in [k for k in found if "lora_A" in k]:
        own = key.removeprefix("base_model.model.").replace("lora_A.", "")
        product = found[key.replace("lora_A", "lora_B")] @ found[key] * scale
        weights[own] = weights[own] + (product.T if name == "gpt2" else product)
        modules += 1
    assert modules == 2 * (4 if name == "gpt2" else 7)
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_text((GOLDEN / name / "config.json").read_text())
    save_file(weights, merged / "model.safetensors")
    logits, _, _ = logits_and_params(merged, tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(before - expected).max() > 0.1


def with_tokenizer(name, folder):
    """Returns a copy of a model with a tokenizer of one letter for each token."""
    shutil.copytree(GOLDEN / name, folder)
    letters = {chr(ord("A") + i): i for i in range(39)} | {"</s>": 39}
    made = Tokenizer(models.WordLevel(letters, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_adapters_are_trained_from_an_import(tmp_path, capfd):
    """By the command line: import, train, generate, export."""
    run, tuned, adapter = tmp_path / "base", tmp_path / "tuned", tmp_path / "adapter"
    source = with_tokenizer("qwen2", tmp_path / "source")
    assert main(["import", "hf", str(source), "--output", str(run)]) == 0
    argv = ["train", "--config", str(run / "lora.gin"), "--workdir", str(tuned)]
    argv += ["--mesh", "fsdp=2,data=4", *sets_of(*DATA, *SMALL)]
    assert main(argv) == 0
    printed = capfd.readouterr().out
    assert "They are the variables of this model; its parameters are new." in printed
    before, after = (dict(Stored.find(folder).arrays()) for folder in (run, tuned))
    names = [path for path in before if path.startswith("params/")]
    for path in names:
        own = path.replace("params/", "variables/")
        np.testing.assert_array_equal(before[path], after[own], err_msg=path)
    ups = [x for path, x in after.items() if path.endswith("_adapter_out")]
    assert any(x.any() for x in ups if x.ndim > 2)
    moments = [path for path in after if path.startswith("opt_state/")]
    assert all("_adapter_" in path for path in moments if after[path].ndim)
    shutil.copy(run / "tokenizer.json", tuned)  # its data has none
    texts = []
    for folder in (run, tuned):
        capfd.readouterr()
        flags = ["--prompt", "ABC", "--tokens", "8", "--temperature", "0"]
        assert main(["generate", str(folder), *flags]) == 0
        texts.append(capfd.readouterr().out.strip())
        assert texts[-1].replace(" ", "").startswith("ABC")
    assert main(["export", "hf", str(run), "--output", str(tmp_path / "out")]) == 0
    copied = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert copied == (source / "tokenizer.json").read_bytes()
    capfd.readouterr()
    assert main(["export", "hf", str(tuned), "--output", str(adapter)]) == 0
    assert f"PEFT adapter of rank 16 for {run}" in capfd.readouterr().out
    assert (adapter / "adapter_model.safetensors").exists()
    error = refused(
        capfd, ["export", "hf", str(run), "--output", str(run / "x"), "--base", "b"]
    )
    assert error == "--base has no effect: the run did not train adapters"


def test_the_base_must_fit(tmp_path, capfd):
    run = tmp_path / "base"
    assert main(["import", "hf", str(GOLDEN / "qwen2"), "--output", str(run)]) == 0
    argv = ["train", "--config", str(run / "lora.gin"), "--workdir", str(run / "t")]
    argv += sets_of(*DATA, *SMALL, "model.base.d_ff=48")
    assert main([*argv, "--dry-run"]) == 2
    assert "do not fit this config, in 3 arrays" in capfd.readouterr().err
