"""`meshloom plan` as text: tables with bars, and what makes up the peak."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...sharding.text import align, human_bytes, percent, seconds_text
from . import explain
from .advice import Change, cheapest_changes
from .predict import Forecast
from .searching.searching import in_words, smallest
from .traffic import by_axes

if TYPE_CHECKING:
    from .compile.compiled import Compiled

WIDTH = 32  # of a bar


def print_styled(text: str) -> None:
    """Prints through rich, which knows the terminal's colours; wraps no lines."""
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    styled.highlight_regex("█+", "cyan")
    styled.highlight_regex("It fits|It does not fit|Nothing fits", "bold")
    Console().print(styled, soft_wrap=True)


def bar(share: float, width: int = WIDTH) -> str:
    filled = min(width, round(share * width))
    more = "+" if share > 1 else ""
    return "█" * filled + more if filled else "▏" * (share > 0)


def show(
    found: Forecast,
    compiled: "Compiled | None" = None,
    *,
    as_json: bool = False,
    with_arrays: bool = False,
) -> None:
    """Prints a forecast, and what would make it fit if it does not.

    Args:
      compiled: the step compiled for the target, to compare with.
      with_arrays: lists the arrays that make up the peak too.
    """
    changes = [] if found.fits else cheapest_changes(found)
    if as_json:
        document = found.to_json() | {
            "changes": [
                {"flags": [*c.flags], "peak": c.forecast.memory.peak, "time": c.slower}
                for c in changes
            ],
            "next": found.next_limit() if found.fits else "memory",
        }
        if compiled is not None:
            document["compiled"] = compiled.to_json()
        if with_arrays:
            document["explain"] = explain.to_json(found)
        print(json.dumps(document, indent=1))
        return
    head = "\n".join([_head(found), *filter(None, [found.choice, *found.case.notes])])
    blocks = [head, _memory(found), _work(found), _time(found)]
    if compiled is not None:
        blocks.append(compiled.table(found))
    if with_arrays:
        blocks.append(explain.explain(found))
    print_styled("\n\n".join(blocks))
    if found.fits:
        print_styled(f"\nIt fits. Next to run out: {found.next_limit()}.")
    else:
        print_styled(_does_not_fit(found, changes))


def _does_not_fit(found: Forecast, changes: Sequence[Change]) -> str:
    target = found.target
    over = human_bytes(found.memory.peak - target.device.usable)
    too_much = f"\nIt does not fit: {over} too much on each device"
    if changes:
        return "\n".join([f"{too_much}. It would with", *(f"  {c}" for c in changes)])
    least = smallest(found.config, target, more_than=target.num_devices)
    return (
        f"{too_much}, and no remat, microbatches, mesh or batch would do. "
        f"{in_words(least, target)}"
    )


def _head(found: Forecast) -> str:
    case, config, target = found.case, found.config, found.target
    sizes = ",".join(f"{k}={v}" for k, v in case.sizes.items() if v > 1)
    num, remat = case.num_microbatches, getattr(config.model, "remat", "unknown")
    parts = f" in {num} microbatches" if num > 1 else ""
    usable, peak = human_bytes(target.device.usable), target.device.flops / 1e12
    devices = f"{target.num_devices} devices of {usable}, {peak:g} bf16 TFLOP/s"
    batch = f"{config.batch_size} examples of {case.length} positions{parts}"
    rows = [
        ("target", f"{target.name}: {devices}"),
        ("mesh", f"{sizes or 'one device'}, plan {config.plan}"),
        ("batch", f"{batch}, remat {remat}"),
    ]
    if case.pipeline is not None:
        done = case.pipeline.simulation
        words = f"{done.name}, {done.num_stages} stages, {percent(done.bubble)} bubble"
        live = ", ".join(map(str, done.live))
        inputs = f"{done.slots} inputs in flight; live by stage {live}"
        rows.append(("pipeline", f"{words}, {inputs}"))
    return align(rows)


def _memory(found: Forecast) -> str:
    """Returns all that is alive at the peak, with bars for the share of the device."""
    memory, hbm = found.memory, found.target.device.usable
    peak = f"{memory.peak / hbm:.0%} of {human_bytes(hbm)}"
    sizes = [(part.name, part.bytes, part.detail) for part in memory.parts]
    sizes.append((f"peak, at the {memory.peak_moment}", memory.peak, peak))
    rows = [("memory of a device", "", "", "")] + [
        (f"  {name}", human_bytes(size), bar(size / hbm), detail)
        for name, size, detail in sizes
    ]
    others = [
        f"{name} {human_bytes(size)}"
        for name, size in memory.at.items()
        if name != memory.peak_moment
    ]
    return f"{align(rows, right=(1,))}\n  other moments: {', '.join(others)}"


def _work(found: Forecast) -> str:
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
    return align(rows, right=(1,))


def _time(found: Forecast) -> str:
    line = found.roofline
    hidden = f"{1000 * (line.serial - line.step):.3g} ms of the network hidden"
    bounds = f"{seconds_text(line.overlapped)} to {seconds_text(line.serial)}"
    most = f"if all overlaps, if nothing does; MFU at most {found.mfu:.0%}"
    step = seconds_text(line.step)
    rows = [
        ("time of a step", "", "", ""),
        *(
            (f"  {name}", seconds_text(seconds), bar(seconds / line.serial), "")
            for name, seconds in line.parts.items()
        ),
        ("  step, modelled", step, "", f"{hidden}, as XLA runs it beside products"),
        ("  bounds", bounds, "", most),
    ]
    return align(rows, right=(1,))
