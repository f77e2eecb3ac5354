"""Cases by chance, legal by construction; some are spoiled afterwards.

Meshes and plans are drawn first, then sizes that they divide. Simple choices come
first everywhere, since hypothesis shrinks towards them.
"""

import functools
import math
from dataclasses import replace
from typing import Any

from fuzz_cases import AXES, NUM_DEVICES, TRANSFORMER, Case, Layout
from fuzz_spoiled import spoiled
from hypothesis import strategies as st

SIZES = (2, 2, 2, 3, 4, 5, 6, 7, 8)
MOST_ROWS = 120
ROW_AXES = ("replica", "data", "fsdp", "expert")
OPTIMIZERS = ("AdamW", "Lion", "Adafactor", "Muon")
RATES = ("Constant", "WarmupCosine", "WarmupStableDecay")


@st.composite
def meshes(draw, family: str) -> dict[str, int]:
    """Sizes of axes, at most NUM_DEVICES in all; those with most to go wrong first.

    Everything here is drawn whether or not it is used: what one choice is does not
    change what the others mean, so each shrinks by itself.
    """
    limit, sizes = NUM_DEVICES, {}
    for axis in ("pipe", "tensor", "fsdp", "data", "replica", "expert"):
        unused = 30 if axis in ("replica", "expert") else 10
        choices = (1,) * unused + SIZES
        if family == "noisy":  # 12 features, 24 hidden units, 6 classes; no stack
            divided = {"pipe": 1, "tensor": 6, "fsdp": 12}.get(axis, NUM_DEVICES)
            choices = tuple(size for size in choices if divided % size == 0)
        size = draw(st.sampled_from([size for size in choices if size <= limit]))
        if size > 1:
            sizes[axis], limit = size, limit // size
    return sizes


@functools.cache
def meshes_of(axes: tuple[str, ...], num_devices: int) -> list[dict[str, int]]:
    """Every product of axis sizes with so many devices, those of few axes first."""
    if not axes:
        return [{}] if num_devices == 1 else []
    found = []
    for size in (n for n in range(1, num_devices + 1) if num_devices % n == 0):
        own = {axes[0]: size} if size > 1 else {}
        found += [own | rest for rest in meshes_of(axes[1:], num_devices // size)]
    return sorted(found, key=len)


@st.composite
def layouts(draw, family: str, num_devices: int | None = None) -> Layout:
    """A layout on so many devices; None for any number."""
    if num_devices is None:
        sizes = draw(meshes(family))
    else:
        sizes = draw(st.sampled_from(meshes_of(AXES, num_devices)))
    plan, rules = draw(plans(family, sizes))
    micro = draw(st.sampled_from((1, 2, 3, 4)))
    schedule = draw(st.sampled_from(("1f1b", "gpipe", "interleaved", "auto")))
    gather = draw(st.sampled_from(("step", "microbatch", "auto")))
    chunks = draw(st.sampled_from((None, 1, 2, 3)))
    stages = draw(st.sampled_from((0, None, 5, 6)))
    layout = Layout(
        mesh=",".join(f"{axis}={size}" for axis, size in sizes.items()) or "data=1",
        plan=plan,
        rules=rules,
        num_microbatches=micro,
    )
    if "pipe" not in sizes:
        return layout
    return replace(
        layout,
        num_microbatches=micro if stages == 0 else stages,
        schedule=schedule,
        num_chunks=chunks if schedule == "interleaved" else None,
        # What is stored whole is not gathered at each use.
        gather="auto" if gather == "microbatch" and "zero1" in plan else gather,
    )


@st.composite
def plans(draw, family: str, sizes: dict[str, int]) -> tuple[str, dict[str, Any]]:
    """A plan that uses every axis of the mesh, and may name more; rules beside it."""
    stored = draw(st.sampled_from(("", "fsdp", "zero1")))
    columns = draw(st.sampled_from(("", "tensor", "tensor2d")))
    sequence = draw(st.sampled_from(("", "sequence")))
    pipeline = draw(st.sampled_from(("", "pipeline")))
    classes = draw(st.sampled_from((None, "tensor")))
    if family != "transformer":
        sequence = ""
        columns = "tensor" if columns or "tensor" in sizes else ""
    if columns == "tensor2d" and "expert" in sizes:
        columns = "tensor"  # it would leave expert idle
    if "tensor" in sizes and not sequence:
        columns = columns or "tensor"
    if "pipe" in sizes:
        pipeline = "pipeline"
    names = ["data", stored, columns, sequence, pipeline]
    if family == "noisy":
        names = names[:3]
    rules = {"classes": classes} if family == "noisy" else {}
    return "+".join(name for name in names if name), rules


@st.composite
def cases(draw, *, processes: int = 1) -> Case:
    """Cases whose devices belong to one process, or evenly to several."""
    families = ("transformer",) * 8 + ("classifier", "noisy")
    family, num_devices = draw(st.sampled_from(families)), None
    if processes > 1:
        family = "transformer"
        num_devices = processes * draw(st.integers(1, NUM_DEVICES // processes))
    layout = draw(layouts(family, num_devices))
    resume = None
    if draw(st.integers(0, 2)) == 2:
        resume = draw(layouts(family, num_devices))
    used = [layout, *([resume] if resume else [])]
    length = _length(draw, used) if family == "transformer" else 8
    batch_size, used = _rows(draw, used, family)
    rates = {"rate": draw(st.sampled_from(RATES))}
    case = Case(
        family=family,
        model=_MODELS[family](draw, used),
        data=draw(st.sampled_from(_DATA[family])),
        batch_size=batch_size,
        length=length,
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        max_grad_norm=draw(st.sampled_from((None, 1.0, 0.05))),
        skip_grad_norm=draw(st.sampled_from((None,) * 8 + (1e6, 1e-9))),
        layout=used[0],
        resume=used[1] if resume else None,
        parts=draw(st.integers(0, 7)) == 7,
        evaluate=draw(st.integers(0, 3)) == 3,
        donate=draw(st.sampled_from((True, False))),
        processes=processes,
        **rates,
    )
    return draw(spoiled(case)) if draw(st.integers(0, 7)) == 7 else case


_DATA = {
    "transformer": ("ones", "some", "packed", "rows", "nan"),
    "classifier": ("ones", "some", "rows", "nan"),
    "noisy": ("ones",),
}


def _ways(layout: Layout, *axes: str) -> int:
    return math.prod(layout.sizes.get(axis, 1) for axis in axes)


def _length(draw, used: list[Layout]) -> int:
    """Stages share the positions, and so do the ways of `sequence`, of each part."""
    unit = math.lcm(*(_ways(layout, "pipe", "tensor") for layout in used))
    return unit * draw(st.integers(max(1, 4 // unit), max(1, 16 // unit)))


def _rows(draw, used: list[Layout], family: str) -> tuple[int, list[Layout]]:
    """A batch size for all layouts, with fewer microbatches where it grows too large.

    The stages of a classifier share the rows of a microbatch.
    """
    result, total = [], 1
    for layout in used:
        ways = _ways(layout, *ROW_AXES)
        if family == "classifier":
            ways *= _ways(layout, "pipe")
        for micro in (layout.num_microbatches, 4, 3, 2, 1):
            rows = math.lcm(total, ways * (micro or 1))
            if rows <= MOST_ROWS:
                break
        total = rows
        if family == "classifier" and micro is None:
            micro = 1  # what the library chose could not be shared by the stages
        result.append(replace(layout, num_microbatches=micro))
    return total * draw(st.integers(1, max(1, 16 // total))), result


def _layers(draw, used: list[Layout]) -> int:
    def parts(layout: Layout) -> int:
        chunks = layout.num_chunks or (2 if layout.schedule == "interleaved" else 1)
        return _ways(layout, "pipe") * chunks

    unit = math.lcm(*(parts(layout) for layout in used))
    return unit * draw(st.integers(1, max(1, 4 // unit)))


def _transformer(draw, used: list[Layout]) -> dict[str, Any]:
    def one(*values):
        return draw(st.sampled_from(values))

    tensor = math.lcm(*(_ways(layout, "tensor") for layout in used))
    # A width that pipe does not divide is stored whole on every stage.
    axes = one(("fsdp", "pipe"), ("fsdp",))
    width = math.lcm(*(_ways(layout, *axes) for layout in used))
    layers = _layers(draw, used)
    kv_heads = tensor * one(1, 2)
    model = {
        "vocab_size": one(64, 37, 257, 1000),
        "pad_vocab_to": tensor * one(1, 3, 16),
        "num_layers": layers,
        "d_model": width * draw(st.integers(-(-8 // width), max(1, 24 // width))),
        "num_heads": kv_heads * one(1, 2, 3),
        "num_kv_heads": kv_heads,
        "head_dim": one(8, 2, 6),
        "d_ff": tensor * one(4, 7, 16),
        "norm": one("rms", "layer"),
        "positions": one("rotary", "learned"),
        "mlp": one("swiglu", "gelu"),
        "use_bias": one(False, True),
        "tied_head": one(False, True),
        "logit_softcap": one(None, None, 5.0),
        "z_loss": one(0.0, 0.0, 1e-2),
        "remat": one("none", "full", "save-dots", "save-named"),
        "unroll": one(1, 2, layers),
        "param_dtype": one("float32", "float32", "bfloat16"),
        "compute_dtype": one("float32", "float32", "bfloat16"),
    }
    return {k: v for k, v in model.items() if v != TRANSFORMER[k]}


def _classifier(draw, used: list[Layout]) -> dict[str, Any]:
    tensor = math.lcm(*(_ways(layout, "tensor") for layout in used))
    width = math.lcm(*(_ways(layout, "fsdp", "pipe") for layout in used))
    return {
        "num_layers": _layers(draw, used),
        "width": width * draw(st.integers(1, 2)),
        "num_hidden": tensor * draw(st.sampled_from((4, 7))),
        "num_classes": tensor * draw(st.sampled_from((2, 3))),
        "remat": draw(st.sampled_from(("none", "full", "save-dots"))),
    }


_MODELS = {
    "transformer": _transformer,
    "classifier": _classifier,
    "noisy": lambda draw, used: {"by_batch": False},
}
