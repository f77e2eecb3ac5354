"""Imports a model of Hugging Face as a folder that `init_from` and `generate` take."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...models.transformer import Config as Model
from ...sharding import MeshSpec
from ..checkpoint.manager import Checkpoints
from ..config import tree as config_tree
from ..config.text import GinText
from ..data import ArrayRecords
from ..program.computation import layout_of
from ..program.optimizers import AdamW
from ..program.schedules import WarmupCosine
from ..program.state import State
from ..record.run_folder import CONFIG_GIN
from ..run.train import Config
from . import documents, families, files
from .folder import appearing, copy_tokenizer
from .streaming import misfits, read_params
from .tensors import BUFFERS, Piece, pieces

# Imported weights are those before the first step.
STEP = 0
# Multiples of it can be sharded over any usual mesh.
PAD_VOCAB_TO = 128
# Tokens of an example in the config that is written, if the model takes as many.
LENGTH = 2048
HEADER = """\
# A {model_type} model, imported by `meshloom import hf`. To train it further:
#   meshloom data build --input GLOB --output DIR --tokenizer {output}/tokenizer.json
#   meshloom train --config {output}/config.gin --set 'data.path="DIR"' --workdir RUN
"""
# Beside it, to train adapters alone.
LORA_GIN = "lora.gin"
LORA = """\
# Trains low-rank adapters (LoRA) of the imported model, and nothing else:
#   meshloom train --config {output}/lora.gin --set 'data.path="DIR"' --workdir RUN
#   meshloom export hf RUN --output ADAPTER
include "config.gin"
from meshloom.models import adapters
from meshloom.models import lora

train.Config.model = @lora.Config()
lora.Config.base = @transformer.Config()
lora.Config.adapters = @adapters.Adapters()
adapters.Adapters.rank = 16
adapters.Adapters.alpha = 32.0
adapters.Adapters.weights = ("qkv", "out", "gate", "up", "down")
schedules.WarmupCosine.peak = 2e-4
"""


class Weights(State):
    """A state that is saved without an optimizer's."""

    def to_tree(self) -> dict[str, Any]:
        return {"step": self.step, "params": self.params}


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder of a model whose names and shapes have been checked."""

    family: families.Family
    model: Model
    tensors: files.Tensors
    pieces: list[Piece]
    notes: list[str]


def import_model(
    path: Path,
    output: Path,
    mesh: Mesh,
    *,
    dtype: str | None = None,
    pad_vocab_to: int = PAD_VOCAB_TO,
) -> list[str]:
    """Writes a checkpoint, a config and the tokenizer; returns lines about them.

    Args:
      dtype: to store the parameters in; None for that of the files.
    """
    with appearing(output) as draft:
        source = open_source(path, dtype=dtype, pad_vocab_to=pad_vocab_to)
        try:
            config = _config(source.model, output)
            params = _read(source, config, mesh)
        finally:
            source.tensors.close()
        found = copy_tokenizer(path, draft)
        text = str(GinText(config, {"model": files.CONFIG, "init_from": "this folder"}))
        head = HEADER.format(model_type=source.family.model_type, output=output)
        (draft / CONFIG_GIN).write_text(head + text, encoding="utf-8")
        (draft / LORA_GIN).write_text(LORA.format(output=output), encoding="utf-8")
        _save(draft / "checkpoints", params, source, config)
    count = sum(x.size for x in jax.tree.leaves(params))
    lines = [
        f"{source.family.model_type}: {len(source.pieces)} tensors, {count:,} "
        f"parameters in {source.model.param_dtype}, written to {output}"
    ]
    if files.TOKENIZER not in found:
        lines.append(
            f"note: {path} has no {files.TOKENIZER}, so `meshloom generate` cannot "
            "encode text"
        )
    return [*lines, *(f"note: {note}" for note in source.notes)]


def open_source(path: Path, *, dtype: str | None, pad_vocab_to: int) -> Source:
    """Opens a folder, or raises ValueError for what is not known or does not fit."""
    where = str(path / files.CONFIG)
    document = files.read_json(path / files.CONFIG)
    family = families.find(document.get("model_type"), where)
    found = files.Tensors(path)
    try:
        stored = {
            found.dtype(name) for name in found.names if not name.endswith(BUFFERS)
        }
        dtype = dtype or ("bfloat16" if stored == {"bfloat16"} else "float32")
        model, notes = documents.read_model(
            *(document, family, where),
            pad_vocab_to=pad_vocab_to,
            param_dtype=dtype,
            compute_dtype="bfloat16" if stored == {"bfloat16"} else "float32",
        )
        if not any(name.startswith(family.stem) for name in found.names):
            family = dataclasses.replace(family, stem="")
        parts = pieces(model, family)
        embedding = parts[0].name if model.tied_head else None
        files.check_names(found, {piece.name for piece in parts}, embedding)
        if wrong := misfits(found, parts):
            name, why = next(iter(wrong.items()))
            raise ValueError(f"{path}: tensor {name!r} {why} ({len(wrong)} such)")
        if stored - {dtype}:
            notes = [*notes, f"{', '.join(sorted(stored))} is stored as {dtype}"]
        return Source(family, model, found, parts, notes)
    except BaseException:
        found.close()
        raise


def _config(model: Model, output: Path) -> Config:
    """Returns a config that trains the model further, from this folder."""
    return Config(
        model=model,
        data=ArrayRecords(path="data/corpus", length=min(model.max_length, LENGTH)),
        optimizer=AdamW(),
        schedule=WarmupCosine(peak=2e-5, warmup_share=0.03),
        mesh=MeshSpec(fsdp=-1),
        batch_size=32,
        num_steps=1000,
        init_from=str(output.absolute()),
    )


def _read(source: Source, config: Config, mesh: Mesh) -> Any:
    layout, _ = layout_of(config, mesh)
    placed = layout.placed(mesh).params
    return read_params(source.tensors, source.pieces, placed)


def _save(folder: Path, params: Any, source: Source, config: Config) -> None:
    about = {"model_type": source.family.model_type}
    metadata = {
        "config_digest": config_tree.digest(config),
        "config": config_tree.flatten(config),
        "huggingface": about,
    }
    checkpoints = Checkpoints(folder)
    try:
        state = Weights(np.int32(STEP), params, ())
        checkpoints.save(STEP, state, metadata)
    finally:
        checkpoints.close()
