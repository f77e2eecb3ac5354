"""Cases with one thing that may not fit: refused by us, or right all the same."""

from dataclasses import replace
from typing import Any

from fuzz_cases import AXES, NUM_DEVICES, TRANSFORMER, Case
from hypothesis import strategies as st

# Rules that somebody may well write, and that do not fit every plan and mesh.
OWN_RULES: tuple[dict[str, Any], ...] = (
    {"kv_heads": None},
    {"vocab": ["tensor", None]},
    {"norm": "fsdp"},
    {"head_dim": "tensor"},
    {"position": "fsdp"},
    {"mlp": "fsdp"},
    {"embed": "tensor"},
    {"layer": "fsdp"},
    {"batch": "data"},
    {"lookup_batch": None},
    {"residual_length": "fsdp"},
    {"length": "tensor"},
    {"length": "context", "residual_length": "context"},
    {"embed": {"optimizer": "data"}},
    {"mlp": {"param": "data", "optimizer": "data"}},
)


@st.composite
def spoiled(draw, case: Case) -> Case:
    """The case with one thing that may not fit; where it does fit, it must be right."""
    layout = case.layout
    model = (TRANSFORMER if case.family == "transformer" else {}) | dict(case.model)
    sizes = [k for k in ("num_layers", "d_model", "d_ff", "width") if k in model]
    names = ["batch_size", "length", "micro", "plan", "rules", "rules", *sizes]
    free = [axis for axis in ("context", *AXES) if axis not in layout.mesh]
    if layout.num_devices <= NUM_DEVICES // 2:
        names.append("mesh")
    what = draw(st.sampled_from(names))
    changes: dict[str, Any] = {}
    if what in ("batch_size", "length"):
        return replace(case, spoiled=what, **{what: getattr(case, what) + 1})
    if what in sizes:
        changed = {**case.model, what: model[what] + 1}
        return replace(case, spoiled=what, model=changed)
    if what == "micro":
        changes["num_microbatches"] = (layout.num_microbatches or 1) + 1
    elif what == "plan":
        left = layout.plan.split("+")
        left.remove(draw(st.sampled_from(left)))
        changes["plan"] = "+".join(left) or "tensor"
    elif what == "rules":
        own = draw(st.sampled_from(OWN_RULES))
        changes["rules"] = dict(layout.rules) | own
        if "context" in own.values() and "mesh" in names:
            changes["mesh"] = f"{layout.mesh},context=2"
    else:
        changes["mesh"] = f"{layout.mesh},{draw(st.sampled_from(free))}=2"
    if "mesh" in changes and case.processes > 1:
        # A resume on the first half of the devices would leave processes without any,
        # which `train` refuses: a mesh has all devices of a job.
        case = replace(case, resume=None)
    return replace(case, spoiled=what, layout=replace(layout, **changes))
