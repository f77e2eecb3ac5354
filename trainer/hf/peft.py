"""Trained adapters (models/lora.py) as a PEFT adapter of the model they belong to.

Adapters of queries, keys and values are one here: PEFT gets the same lora_A three
times, and its part of lora_B each.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...models import lora
from ...models.adapters import DOWN, UP
from ..checkpoint.inspect import Stored
from . import families
from .exporting import NUMPY, save
from .folder import appearing
from .tensors import Piece, pieces

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def export_adapter(
    stored: Stored,
    model: lora.Config,
    output: Path,
    *,
    base: str,
    family: str | None = None,
    dtype: str | None = None,
) -> list[str]:
    """Writes the adapters of a checkpoint; returns lines about them.

    Args:
      base: the name or folder of the base model, for PEFT.
      family: the model_type of the base; None for the first that fits.
      dtype: of the tensors; None for that of the parameters.
    """
    row = families.family_of(model.base)
    if family is not None:
        row = families.find(family, "--family")
    adapted = [piece for piece in pieces(model.base, row) if _is_adapted(piece, model)]
    found = {
        path.removeprefix("params/blocks/"): array
        for path, array in stored.arrays()
        if path.startswith("params/")
    }
    kind = NUMPY[dtype or model.base.param_dtype]
    tensors = {
        name: np.ascontiguousarray(x).astype(kind)
        for piece in adapted
        for name, x in _tensors(piece, found, row)
    }
    with appearing(output) as draft:
        save(tensors, draft / WEIGHTS)
        document = _document(model, adapted, row, base)
        text = json.dumps(document, indent=2) + "\n"
        (draft / CONFIG).write_text(text, encoding="utf-8")
    return [
        f"PEFT adapter of rank {model.adapters.rank} for {base} ({row.model_type}): "
        f"{len(tensors)} tensors of step {stored.step}, written to {output}"
    ]


def _is_adapted(piece: Piece, model: lora.Config) -> bool:
    name = piece.leaf.rpartition("/")[2]
    return piece.layer is not None and name in model.adapters.weights


def _tensors(
    piece: Piece, found: dict[str, np.ndarray], family: families.Family
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields lora_A [rank, in] and lora_B [out, rank] of a projection.

    A tensor of theirs is a permuted weight [in, out], whose dimensions are those of A
    without the rank, followed by those of B without it.
    """
    leaf = piece.leaf.removeprefix("blocks/")
    down, up = found[leaf + DOWN][piece.layer], found[leaf + UP][piece.layer]
    own = f"{PREFIX}{piece.name.removesuffix('.weight')}."
    num_in = down.ndim - 1
    # The part of B that belongs to this tensor: all but for queries, keys and values.
    ends = [slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True)]
    up = up[(slice(None), *ends[num_in:])]
    if family.model_type == families.GPT2.model_type and leaf.endswith("qkv"):
        up = up.transpose(0, 2, 1, 3)  # theirs has queries, keys, values outermost
    yield f"{own}lora_A.weight", down.reshape(-1, down.shape[-1]).T
    yield f"{own}lora_B.weight", up.reshape(up.shape[0], -1).T


def _document(
    model: lora.Config, adapted: list[Piece], family: families.Family, base: str
) -> dict[str, Any]:
    names = {piece.name.removesuffix(".weight") for piece in adapted}
    if family.model_type == families.GPT2.model_type:
        # Two of its projections have the same name, so paths are given, as a pattern.
        short = {name.split(".", 3)[3] for name in names}
        targets: Any = rf".*\.h\.\d+\.({'|'.join(sorted(short))})"
    else:
        targets = sorted({name.rpartition(".")[2] for name in names})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.adapters.rank,
        "lora_alpha": model.adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": family.model_type == families.GPT2.model_type,
        "target_modules": targets,
        "inference_mode": True,
    }
