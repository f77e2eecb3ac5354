"""The report section on the mesh and on how arrays are sharded over it."""

from html import escape
from typing import Any

from ...sharding.text import human_bytes, short_number
from .data import RunFiles
from .tables import code, plain_text, section, table

_NUM_LARGEST = 12
# Measured relative differences of losses between meshes: see docs/training.md.
_SAME_CURVE = {"float32": ("1e-6", "1e-4"), "bfloat16": ("5e-3", "5e-2")}


def sharding(run: RunFiles) -> str:
    """Returns the mesh, the totals, the largest arrays and the replicated ones."""
    if run.sharding is None:
        return ""
    layout = run.sharding
    facts = [["Mesh", _mesh(layout.get("mesh"))]]
    for name, value in (layout.get("totals") or {}).items():
        if not (name == "replicated_bytes" and _is_one_device(layout)):
            title = name.replace("_", " ").capitalize()
            facts.append([escape(title), _amount(name, value)])
    arrays = sorted(layout.get("arrays", []), key=lambda a: -a.get("bytes", 0))
    html = _precision(run) + table(["Property", "Value"], facts)
    if arrays:
        html += f'<h3 class="table">Largest arrays{_of(arrays)}</h3>'
        html += _arrays(arrays, on_one_device=_is_one_device(layout))
    # On one device nothing is sharded, so there is nothing to report.
    replicated = [array for array in arrays if array.get("ways") == 1]
    if replicated and not _is_one_device(layout):
        html += f'<h3 class="table">Largest replicated arrays{_of(replicated)}</h3>'
        html += _arrays(replicated, on_one_device=False)
    return section("Mesh and sharding", html)


def _precision(run: RunFiles) -> str:
    """Returns a note on how closely losses on other meshes would agree."""
    dtype = run.config_value("model.compute_dtype")
    if dtype not in _SAME_CURVE:
        return ""
    first, later = _SAME_CURVE[dtype]
    return (
        f'<p class="note">Computed in {escape(dtype)}: on another mesh sums round in a '
        f"different order. Expect losses within {first} of these over the first 6 "
        f"steps, and within {later} over the first 20.</p>"
    )


def _is_one_device(layout: dict[str, Any]) -> bool:
    mesh = layout.get("mesh")
    return isinstance(mesh, dict) and all(size == 1 for size in mesh.values())


def _of(arrays: list[dict[str, Any]]) -> str:
    shown = min(len(arrays), _NUM_LARGEST)
    return f", {shown} of {len(arrays)}" if len(arrays) > shown else ""


def _arrays(arrays: list[dict[str, Any]], *, on_one_device: bool) -> str:
    rows = []
    for array in arrays[:_NUM_LARGEST]:
        row = [
            code(str(array.get("path", ""))),
            escape(" × ".join(map(str, array.get("shape", ()))) or "scalar"),
            escape(str(array.get("dtype", ""))),
            _amount("bytes", array.get("bytes")),
        ]
        if not on_one_device:
            row += [_amount("bytes", array.get("bytes_per_device")), _dimensions(array)]
        rows.append(row)
    headings = ["Array", "Shape", "Type", "Size"]
    if not on_one_device:
        headings += ["Per device", "Sharded"]
    return table(headings, rows, numbers=(3, 4))


def _dimensions(array: dict[str, Any]) -> str:
    """Returns the sharded dimensions, each with its mesh axes."""
    spec, axes = array.get("spec") or [], array.get("axes") or []
    found = []
    for number, mesh_axes in enumerate(spec):
        if mesh_axes:
            name = axes[number] if number < len(axes) else None
            over = mesh_axes if isinstance(mesh_axes, list) else [mesh_axes]
            shown = name or f"dimension {number}"
            found.append(f"{shown} over {'+'.join(map(str, over))}")
    ways = array.get("ways")
    if not found:
        return "no"
    return escape(", ".join(found)) + (f" ({ways} ways)" if ways else "")


def _mesh(mesh: Any) -> str:
    if not isinstance(mesh, dict):
        return escape("not recorded" if mesh is None else str(mesh))
    used = [f"{name} {size}" for name, size in mesh.items() if size != 1]
    return escape(" × ".join(used) or "one device")


def _amount(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return escape("" if value is None else plain_text(value))
    if "bytes" in name:
        return human_bytes(value)
    return short_number(value) if abs(value) >= 1e5 else escape(str(value))
