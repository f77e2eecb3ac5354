"""`meshloom plan --explain`: which arrays make up the peak, and on which stage."""

import dataclasses
from fractions import Fraction
from itertools import groupby
from typing import Any

from ...sharding.text import align, human_bytes
from .arrays import DeviceArray, rows
from .predict import Forecast
from .scenario import Case

# Arrays of a part with less than this share of the peak are shown as one row.
SMALL = 1e-3
WHEN = {
    "head": "when the forward pass is done and the head is differentiated",
    "backward": "when the first block runs backward",
    "update": "when all gradients are there and the state is updated",
}


def explain(forecast: Forecast) -> str:
    """Lists the arrays of each part, largest first, and what stages have in common."""
    memory, case = forecast.memory, forecast.case
    share = memory.peak / forecast.target.device.usable
    title = (
        f"the peak of a device: {human_bytes(memory.peak)}, {share:.0%} of its memory, "
        f"{WHEN[memory.peak_moment]}"
    )
    lines: list[tuple[str, ...]] = [
        ("", "axes", "whole", "on a device", "type", "count", "bytes")
    ]
    for name, found in by_part(forecast):
        total = sum(row.bytes for row in found)
        lines.append((f"  {name}", "", "", "", "", "", human_bytes(total)))
        lines += _shown(found, SMALL * memory.peak)
    text = f"{title}\n{align(lines, right=(5, 6))}"
    return f"{text}\n\n{_stages(case)}" if case.pipeline else text


def by_part(forecast: Forecast) -> list[tuple[str, list[DeviceArray]]]:
    """Returns (part, its arrays), largest first; all arrays sum to the peak."""
    parts = sorted(forecast.memory.parts, key=lambda part: part.name)
    found = []
    for name, group in groupby(parts, key=lambda part: part.name):
        arrays = [row for part in group for row in rows(forecast.case, part)]
        if arrays:
            found.append((name, sorted(arrays, key=lambda row: -row.bytes)))
    return sorted(found, key=lambda each: -sum(row.bytes for row in each[1]))


def to_json(forecast: Forecast) -> dict[str, Any]:
    arrays = [
        {"part": name, **dataclasses.asdict(row)}
        for name, found in by_part(forecast)
        for row in found
    ]
    return {"arrays": arrays, "stages": stages(forecast.case)}


def _shown(found: list[DeviceArray], small: float) -> list[tuple[str, ...]]:
    rest = [row for row in found if row.bytes < small]
    if len(rest) < 2:
        rest = []
    lines = [
        (
            f"    {row.name}",
            ",".join(axis or "-" for axis in row.axes),
            "x".join(map(str, row.shape)),
            "x".join(map(str, row.cut)),
            row.dtype,
            str(Fraction(row.count).limit_denominator(10_000)),
            human_bytes(row.bytes),
        )
        for row in found[: len(found) - len(rest)]
        if row.shape
    ]
    if rest:
        total = human_bytes(sum(row.bytes for row in rest))
        lines.append((f"    {len(rest)} smaller", "", "", "", "", "", total))
    return lines


def stages(case: Case) -> list[dict[str, Any]]:
    """Returns what differs between stages; nothing without a pipeline."""
    if case.pipeline is None:
        return []
    order = [int(layer) for layer in case.pipeline.order]
    each, live = case.layers, case.pipeline.simulation.live
    return [
        {"stage": s, "layers": order[s * each : (s + 1) * each], "in_flight": live[s]}
        for s in range(case.num_stages)
    ]


def _stages(case: Case) -> str:
    """All stages run one program, so each reserves what the largest needs."""
    assert case.pipeline is not None
    slots = case.pipeline.schedule.num_slots
    spread = {
        path: any("pipe" in d.mesh_axes for d in weight.stored.dimensions)
        for path, weight in case.sharded.weights.items()
        if not case.is_block(path)
    }
    lines = [
        "stages: all run one program, so each device of each stage reserves the same",
        f"  {slots} slots for inputs in flight are on every stage; how many are ever "
        "filled differs",
    ]
    for is_sharded, words in ((True, "sharded"), (False, "replicated")):
        if paths := [path for path in spread if spread[path] == is_sharded]:
            lines.append(f"  {words} over the stages: {', '.join(paths)}")
    table = [("  stage", "layers", "slots filled at most")]
    for found in stages(case):
        cells = f"  {found['stage']}", _ranges(found["layers"]), f"{found['in_flight']}"
        table.append(cells)
    return "\n".join([*lines, align(table, right=(2,))])


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 8, 9] -> '0-2, 8-9'."""
    words = []
    for _, run in groupby(
        enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]
    ):
        ends = [number for _, number in run]
        words.append(f"{ends[0]}-{ends[-1]}" if len(ends) > 1 else f"{ends[0]}")
    return ", ".join(words)
