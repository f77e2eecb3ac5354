"""A config.json of Hugging Face as a `Config` of ours, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...models.rope_scaling import RopeScaling
from ...models.transformer import Config
from .families import DROPOUTS, Family

Document = Mapping[str, Any]
# Settings of ours that do not change what a model computes, up to rounding, and z_loss,
# which only training uses.
OWN = (
    *("pad_vocab_to", "z_loss", "remat", "unroll", "attention"),
    *("head_block", "context_attention", "param_dtype", "compute_dtype"),
)


def read_model(
    document: Document, family: Family, where: str, **settings: Any
) -> tuple[Config, list[str]]:
    """Returns the model of a config.json, and notes about what differs here.

    Args:
      where: the name of the file, for errors.
      settings: of ours, such as param_dtype.

    Raises:
      ValueError: it has something that is not known, or lacks something.
    """
    _check(document, family, where)
    values = {}
    for ours, theirs in family.fields.items():
        if theirs not in document and theirs not in family.defaults:
            raise ValueError(
                f"{where}: it has no {theirs}, which a model of {family.model_type!r} "
                "needs"
            )
        values[ours] = document.get(theirs, family.defaults.get(theirs))
    if values["d_ff"] is None:
        values["d_ff"] = 4 * values["d_model"]
    notes = [
        f"{name}={document[name]} is not applied: there is no dropout"
        for name in DROPOUTS
        if document.get(name)
    ]
    if family.has_rope:
        values |= _rope(document, where)
    window = _window(document, family, where)
    if window is not None and window < values["max_length"]:
        notes.append(
            f"max_length is {window}, not {values['max_length']}: longer sequences "
            f"need a sliding window of {window}, which there is not"
        )
        values["max_length"] = window
    try:
        return Config(**values, **family.settings, **settings), notes
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def write_model(model: Config, family: Family) -> dict[str, Any]:
    """Returns the config.json of a model; raises ValueError if it cannot describe it.

    It can if the model that is read from it computes the same.
    """
    document: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
    }
    full = dataclasses.replace(
        model, num_kv_heads=model.kv_heads, head_dim=model.head_width
    )
    for ours, theirs in family.fields.items():
        is_default = getattr(model, ours) is family.defaults.get(theirs, ...) is None
        if not is_default:
            document[theirs] = getattr(full, ours)
    for name, values in family.fixed.items():
        if values is not None and name in ("hidden_act", "activation_function"):
            document[name] = values[0]  # the others are defaults
    if family.has_rope:
        document["rope_theta"] = model.rope_theta
        document["rope_scaling"] = _scaling(model.rope_scaling)
    if family.model_type == "mistral":
        document["sliding_window"] = None  # the default of the family is a window
    document["torch_dtype"] = model.param_dtype
    again, _ = read_model(document, family, "config.json")
    for field in dataclasses.fields(Config):
        name = {"num_kv_heads": "kv_heads", "head_dim": "head_width"}.get(
            field.name, field.name
        )
        before, after = getattr(model, name), getattr(again, name)
        if field.name not in OWN and before != after:
            raise ValueError(
                f"the model has {field.name}={before!r}, but {family.model_type} "
                f"models have {after!r}: they cannot compute the same"
            )
    return document


def _check(document: Document, family: Family, where: str) -> None:
    kind = family.model_type
    if document.get("quantization_config") is not None:
        method = document["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"{where}: the weights are quantized ({method}); give the folder of the "
            "original weights"
        )
    for name, value in document.items():
        if name not in family.known and value not in (None, False):
            raise ValueError(
                f"{where}: {name}={value!r} is not known for model_type {kind!r}. If "
                "it does not change what the model computes, remove it from the file."
            )
        allowed = family.fixed.get(name)
        if allowed is not None and value not in (*allowed, None):
            expected = " or ".join(map(repr, allowed))
            raise ValueError(
                f"{where}: {name} is {value!r}; models of {kind!r} can be imported "
                f"with {expected} only"
            )


def _rope(document: Document, where: str) -> dict[str, Any]:
    """Returns our settings of rotary positions, from either form of config.json."""
    given = document.get("rope_parameters") or document.get("rope_scaling") or {}
    theta = given.get("rope_theta", document.get("rope_theta", 10_000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    names = {"factor": "factor"} if kind != "default" else {}
    if kind == "llama3":
        names |= {
            "low": "low_freq_factor",
            "high": "high_freq_factor",
            "original_length": "original_max_position_embeddings",
        }
    elif kind not in ("linear", "default"):
        raise ValueError(
            f"{where}: rope_scaling of type {kind!r} is not known; known are linear "
            "and llama3"
        )
    if missing := [name for name in names.values() if name not in given]:
        raise ValueError(f"{where}: rope_scaling of type {kind!r} has no {missing[0]}")
    extra = set(given) - {*names.values(), "rope_theta", "rope_type", "type"}
    if extra - {"partial_rotary_factor"} or given.get("partial_rotary_factor", 1) != 1:
        name = min(extra)
        raise ValueError(
            f"{where}: {name}={given[name]!r} is not known for rope_scaling of type "
            f"{kind!r}"
        )
    if kind == "default":
        return {"rope_theta": theta}
    values = {ours: given[theirs] for ours, theirs in names.items()}
    try:
        scaling = RopeScaling(kind=kind, **values)
        return {"rope_theta": theta, "rope_scaling": scaling}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values |= {
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original_length,
        }
    return values


def _window(document: Document, family: Family, where: str) -> int | None:
    """Returns the window of attention, None if there is none."""
    said = {name: document.get(name, x) for name, x in family.windows.items()}
    kinds = set(said.get("layer_types") or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{where}: layer_types has {min(unknown)!r}, which is unknown")
    if kinds == {"full_attention"} or not said.get("use_sliding_window", True):
        return None
    return said.get("sliding_window")
