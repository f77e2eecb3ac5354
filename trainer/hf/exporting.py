"""Exports a checkpoint as a folder that `transformers` loads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ...models.transformer import Config as Model
from ..checkpoint.inspect import Stored
from . import documents, families, files
from .folder import appearing, copy_tokenizer
from .tensors import Piece, pieces

# Of one file; larger models are written as several with an index.
FILE_BYTES = 5 * 2**30
NUMPY = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def export_model(
    stored: Stored,
    model: Model,
    output: Path,
    *,
    family: str | None = None,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> list[str]:
    """Writes config.json, safetensors files and the tokenizer; returns lines.

    Args:
      family: the model_type to write; None for that of an imported model, or the first
        that fits.
      dtype: of the tensors; None for that of the parameters.
      tokenizer: the folder with its files, if there is one.
    """
    saved = stored.manifest()
    kind = family or saved.get("huggingface", {}).get("model_type")
    row = families.find(kind, "--family") if kind else families.family_of(model)
    dtype = dtype or model.param_dtype
    document = documents.write_model(model, row) | {"torch_dtype": dtype}
    by_leaf: dict[str, list[Piece]] = {}
    for piece in pieces(model, row):
        by_leaf.setdefault(piece.leaf, []).append(piece)
    order = [path.removeprefix("params/") for path in saved["arrays"]]
    parts = [piece for leaf in order for piece in by_leaf.get(leaf, ())]
    groups = _groups(parts, NUMPY[dtype].itemsize, file_bytes)
    with appearing(output) as draft:
        _write_tensors(draft, _tensors(stored, by_leaf, NUMPY[dtype]), groups)
        names = copy_tokenizer(tokenizer, draft) if tokenizer else []
        text = json.dumps(document, indent=2) + "\n"
        (draft / files.CONFIG).write_text(text, encoding="utf-8")
    lines = [
        f"{row.model_type}: {len(parts)} tensors of step {stored.step} in {dtype}, in "
        f"{len(groups)} file{'s' * (len(groups) > 1)}, written to {output}"
    ]
    if files.TOKENIZER not in names:
        lines.append(
            f"note: no {files.TOKENIZER} was found for this run, so {output} has none; "
            "--tokenizer names its folder"
        )
    return lines


def _groups(parts: list[Piece], itemsize: int, limit: int) -> list[list[str]]:
    """Returns the names of the tensors in each file, in the order they are written."""
    groups: list[list[str]] = [[]]
    size = 0
    for piece in parts:
        own = int(np.prod(piece.shape)) * itemsize
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(piece.name)
        size += own
    return groups


def _tensors(
    stored: Stored, by_leaf: dict[str, list[Piece]], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor, in the order of our arrays, of which one is in memory."""
    for path, array in stored.arrays():
        leaf = path.removeprefix("params/")
        for piece in by_leaf.get(leaf, ()) if path.startswith("params/") else ():
            yield piece.name, piece.theirs(array).astype(dtype, copy=False)


def _write_tensors(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], groups: list[list[str]]
) -> None:
    total, weight_map = 0, {}
    for number, group in enumerate(groups, 1):
        name = files.SINGLE
        if len(groups) > 1:
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        found = dict(tensor for _, tensor in zip(group, tensors, strict=False))
        assert list(found) == group, "the order of the checkpoint's arrays"
        save(found, folder / name)
        weight_map |= dict.fromkeys(group, name)
        total += sum(x.nbytes for x in found.values())
    if len(groups) > 1:
        index: dict[str, Any] = {
            "metadata": {"total_size": total},
            "weight_map": weight_map,
        }
        text = json.dumps(index, indent=2) + "\n"
        (folder / files.INDEX).write_text(text, encoding="utf-8")


def save(tensors: dict[str, np.ndarray], file: Path) -> None:
    """Writes a safetensors file as `transformers` expects it."""
    library = files.safetensors("export hf")
    from safetensors.numpy import save_file

    file.touch()
    mode = file.stat().st_mode  # as the umask has it; the library makes it 0600
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except library.SafetensorError as error:
        raise ValueError(f"{file} cannot be written: {error}") from error
    file.chmod(mode)
