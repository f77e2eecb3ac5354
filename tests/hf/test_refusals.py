"""What is not known is refused by name; a folder appears whole or not at all."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from paths import ROOT
from safetensors.numpy import load_file, save_file
from tiny_runs import TINY, main, refused

from meshloom.models.adapters import Adapters
from meshloom.trainer.hf import documents, families
from meshloom.trainer.hf.tensors import pieces

GOLDEN = ROOT / "tests" / "golden" / "hf"


@pytest.fixture
def folder(tmp_path):
    """A function that copies a model and changes its config and its tensors."""

    def copy(name="llama2", config=(), tensors=()):
        target = tmp_path / name
        shutil.copytree(GOLDEN / name, target)
        path = target / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(config)))
        if tensors:
            file = target / "model.safetensors"
            found = load_file(file) | dict(tensors)
            found = {k: x for k, x in found.items() if x is not None}
            save_file(found, file, metadata={"format": "pt"})
        return target

    return copy


def error_of(capfd, folder: pathlib.Path) -> str:
    """Returns the error of an import, which leaves nothing behind."""
    output = folder.parent / "run"
    error = refused(capfd, ["import", "hf", str(folder), "--output", str(output)])
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return error


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
EXTRA = {"model.layers.0.self_attn.extra.weight": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    "config, tensors, message",
    [
        ({"model_type": "bert"}, (), "model_type 'bert' is not known; known are llama"),
        ({"model_type": "mixtral"}, (), "model_type 'mixtral' has experts, which are"),
        ({"model_type": "qwen3_moe"}, (), "model_type 'qwen3_moe' has experts"),
        ({"rope_parameters": YARN}, (), "rope_scaling of type 'yarn' is not known"),
        ({"rope_parameters": {"rope_type": "linear"}}, (), "'linear' has no factor"),
        ({"attention_bias": True}, (), "attention_bias is True; models of 'llama' can"),
        ({"hidden_act": "gelu"}, (), "hidden_act is 'gelu'"),
        ({"clip_qkv": 8.0}, (), "clip_qkv=8.0 is not known for model_type 'llama'"),
        ({"sliding_window": 8}, (), "sliding_window=8 is not known for model_type"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            (),
            "the weights are quantized (awq)",
        ),
        ({"num_hidden_layers": 3}, (), "'model.layers.2.input_layernorm.weight' and 8"),
        ({"num_hidden_layers": 1}, (), "'model.layers.1.input_layernorm.weight' and 8"),
        ({"vocab_size": 41}, (), "has shape [40, 16], but config.json says [41, 16]"),
        ({}, EXTRA, "tensor 'model.layers.0.self_attn.extra.weight' is not known"),
        ({}, {"model.norm.weight": None}, "tensor 'model.norm.weight' is missing"),
        (
            {},
            {"model.norm.weight": np.zeros(16, np.int8)},
            "tensor 'model.norm.weight' has dtype I8; expected F32, F16, BF16",
        ),
        ({"tie_word_embeddings": True}, (), "lm_head.weight differs from model.embed"),
    ],
)
def test_what_is_not_known_is_named(config, tensors, message, folder, capfd):
    assert message in error_of(capfd, folder("llama2", config, tensors))


def test_a_required_value_is_named(folder, capfd):
    source = folder()
    path = source / "config.json"
    document = json.loads(path.read_text())
    del document["hidden_size"]
    path.write_text(json.dumps(document))
    assert "has no hidden_size, which a model of 'llama'" in error_of(capfd, source)


def test_files_are_named(folder, capfd):
    source = folder("qwen3")
    (source / "model-00002-of-00004.safetensors").unlink()
    assert "names model-00002-of-00004.safetensors, which is" in error_of(capfd, source)
    file = source / "model-00001-of-00004.safetensors"
    shutil.copyfile(file, source / "model-00002-of-00004.safetensors")
    assert "is in another file too" in error_of(capfd, source)
    index = source / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    name = next(iter(found["weight_map"]))
    index.write_text(json.dumps({"weight_map": {name: "../elsewhere"}}))
    assert "'../elsewhere' is not the name of a file" in error_of(capfd, source)
    index.unlink()
    (source / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is pickled, which is not read" in error_of(capfd, source)
    (source / "model.safetensors").write_bytes(b"no tensors")
    assert "is not a safetensors file" in error_of(capfd, source)


def test_a_folder_that_is_not_a_model(tmp_path, capfd):
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "config.json cannot be read (No such file" in error_of(capfd, folder)


def test_an_output_is_never_replaced(folder, tmp_path, capfd):
    source = folder()
    error = refused(capfd, ["import", "hf", str(source), "--output", str(source)])
    assert "it exists and is not an empty folder; name a new one" in error


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_dtypes_and_forms_of_a_folder(name, folder, tmp_path, capfd):
    """bfloat16, buffers and heads of earlier versions, names without a prefix."""
    found = load_file(GOLDEN / name / "model.safetensors")
    found = {k: x.astype(ml_dtypes.bfloat16) for k, x in found.items()}
    if name == "gpt2":
        found |= {"transformer.h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8)}
        found = {k.removeprefix("transformer."): x for k, x in found.items()}
        found["lm_head.weight"] = found["wte.weight"]
    source = folder(name)
    save_file(found, source / "model.safetensors")
    run, output = tmp_path / "run", tmp_path / "out"
    assert main(["import", "hf", str(source), "--output", str(run)]) == 0
    printed = capfd.readouterr().out
    assert f"{name}: " in printed and "in bfloat16" in printed
    assert ("note: max_length is 32, not 64" in printed) == (name == "mistral")
    assert main(["export", "hf", str(run), "--output", str(output)]) == 0
    exported = load_file(output / "model.safetensors")
    for key, x in exported.items():
        own = found[key.removeprefix("transformer.")]
        assert x.dtype == own.dtype and x.tobytes() == own.tobytes(), key
    assert len(exported) == len(found) - 2 * (name == "gpt2")


def test_a_run_without_a_family_is_refused():
    document = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    qwen3 = families.FAMILIES["qwen3"]
    model, _ = documents.read_model(document, qwen3, "config.json")
    assert families.family_of(model) is qwen3
    with pytest.raises(ValueError, match="no family of Hugging Face has a model with"):
        families.family_of(documents.dataclasses.replace(model, qkv_bias=True))
    capped = documents.dataclasses.replace(model, logit_softcap=30.0)
    with pytest.raises(ValueError, match="logit_softcap=30.0, but qwen3 models have"):
        documents.write_model(capped, qwen3)
    adapted = documents.dataclasses.replace(model, adapters=Adapters())
    with pytest.raises(ValueError, match="the model has adapters=Adapters"):
        documents.write_model(adapted, qwen3)
    assert {piece.name for piece in pieces(model, qwen3)} > {"lm_head.weight"}


def test_the_folder_of_weights_is_not_a_run(folder, tmp_path, capfd):
    run = tmp_path / "run"
    assert main(["import", "hf", str(folder()), "--output", str(run)]) == 0
    error = refused(capfd, ["train", "--config", TINY, "--workdir", str(run)])
    assert "holds weights without a run" in error and "init_from=" in error
