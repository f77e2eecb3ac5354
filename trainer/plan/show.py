"""`meshloom plan` as text: tables with bars, and what makes up the peak."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...sharding.text import align, human_bytes
from . import explain
from .advice import Change, cheapest_changes
from .predict import Plan
from .searching.smallest import in_words, smallest
from .text import bar as _bar
from .text import print_styled as _print
from .text import seconds_text as _seconds
from .traffic import by_axes

if TYPE_CHECKING:
    from .compile.compiled import Compiled


def show(
    found: Plan,
    compiled: "Compiled | None" = None,
    *,
    as_json: bool = False,
    with_arrays: bool = False,
) -> None:
    """Prints a plan, and what would make it fit if it does not.

    Args:
      compiled: the step compiled for the target, to compare with.
      with_arrays: lists the arrays that make up the peak too.
    """
    changes = [] if found.fits else cheapest_changes(found)
    if as_json:
        document = _json(found, changes, compiled)
        if with_arrays:
            document["explain"] = explain.to_json(found)
        print(json.dumps(document, indent=1))
        return
    head = _head(found) + (f"\n{found.choice}" if found.choice else "")
    blocks = [head, _memory(found), _work(found), _time(found)]
    if compiled is not None:
        blocks.append(compiled.table(found))
    if with_arrays:
        blocks.append(explain.explain(found))
    _print("\n\n".join(blocks))
    if found.fits:
        _print(f"\nIt fits. Next to run out: {found.next_limit()}.")
    else:
        _print(_does_not_fit(found, changes))


def _json(
    found: Plan, changes: Sequence[Change], compiled: "Compiled | None"
) -> dict[str, Any]:
    document = found.to_json() | {
        "changes": [
            {"flags": list(c.flags), "peak": c.plan.memory.peak, "time": c.slower}
            for c in changes
        ],
        "next": found.next_limit() if found.fits else "memory",
    }
    if compiled is not None:
        document["compiled"] = compiled.to_json()
    return document


def _does_not_fit(found: Plan, changes: Sequence[Change]) -> str:
    target = found.target
    over = human_bytes(found.memory.peak - target.device.usable)
    too_much = f"\nIt does not fit: {over} too much on each device"
    if not changes:
        least = smallest(found.config, target, more_than=target.num_devices)
        return (
            f"{too_much}, and no remat, microbatches, mesh or batch would do. "
            f"{in_words(least, target)}"
        )
    return "\n".join([f"{too_much}. It would with", *(f"  {c}" for c in changes)])


def _head(found: Plan) -> str:
    case, target = found.case, found.target
    sizes = ",".join(f"{k}={v}" for k, v in case.sizes.items() if v > 1)
    rows = [
        (
            "target",
            f"{target.name}: {target.num_devices} devices of "
            f"{human_bytes(target.device.usable)}, "
            f"{target.device.flops / 1e12:g} bf16 TFLOP/s",
        ),
        ("mesh", f"{sizes or 'one device'}, plan {found.config.plan}"),
        (
            "batch",
            f"{found.config.batch_size} examples of {case.length} positions"
            f"{_in_parts(found)}, remat {_remat(found)}",
        ),
    ]
    if case.pipeline is not None:
        done = case.pipeline.simulation
        rows.append(
            (
                "pipeline",
                f"{done.name}, {done.num_stages} stages, {100 * done.bubble:.1f} % "
                f"bubble, {done.slots} inputs in flight; live by stage "
                f"{', '.join(map(str, done.live))}",
            )
        )
    return align(rows)


def _in_parts(found: Plan) -> str:
    num = found.case.num_microbatches
    return f" in {num} microbatches" if num > 1 else ""


def _remat(found: Plan) -> str:
    return getattr(found.config.model, "remat", "unknown")


def _memory(found: Plan) -> str:
    """All that is alive at the peak, with a bar for its share of the device."""
    memory, hbm = found.memory, found.target.device.usable
    rows = [("memory of a device", "", "", "")]
    for part in memory.parts:
        rows.append(
            (
                f"  {part.name}",
                human_bytes(part.bytes),
                _bar(part.bytes / hbm),
                part.detail,
            )
        )
    share = memory.peak / hbm
    rows.append(
        (
            f"  peak, at the {memory.peak_moment}",
            human_bytes(memory.peak),
            _bar(share),
            f"{share:.0%} of {human_bytes(hbm)}",
        )
    )
    others = [
        f"{name} {human_bytes(memory.arguments + sum(p.bytes for p in parts))}"
        for name, parts in memory.moments.items()
        if name != memory.peak_moment
    ]
    return f"{_aligned(rows)}\n  other moments: {', '.join(others)}"


def _work(found: Plan) -> str:
    flops = found.flops
    ratio = flops.executed / flops.model
    rows = [
        ("work of a device and step", "", ""),
        ("  executed", f"{flops.executed:.4g} FLOPs", f"{ratio:.3f} of the model's"),
        ("  model", f"{flops.model:.4g} FLOPs", ""),
    ]
    for axes, count in sorted(by_axes(found.transfers).items(), key=lambda x: -x[1]):
        kinds = sorted({t.kind for t in found.transfers if t.axes == axes})
        rows.append((f"  over {','.join(axes)}", human_bytes(count), ", ".join(kinds)))
    return _aligned(rows)


def _time(found: Plan) -> str:
    line = found.roofline
    rows = [("time of a step", "", "", "")]
    for name, seconds in line.parts.items():
        rows.append((f"  {name}", _seconds(seconds), _bar(seconds / line.serial), ""))
    hidden = 1000 * (line.serial - line.step)
    rows.append(
        (
            "  step, modelled",
            _seconds(line.step),
            "",
            f"{hidden:.3g} ms of the network hidden, as XLA runs it beside products",
        )
    )
    rows.append(
        (
            "  bounds",
            f"{_seconds(line.overlapped)} to {_seconds(line.serial)}",
            "",
            f"if all overlaps, if nothing does; MFU at most {found.mfu:.0%}",
        )
    )
    return _aligned(rows)


def _aligned(rows) -> str:
    return align(rows, right=(1,))
