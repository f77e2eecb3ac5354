"""`meshloom plan --scale` as text and JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....sharding.text import align
from ...program.hardware import Target
from ..text import bar, print_styled, seconds_text
from .reasons import why_not
from .scaling import Kind, Point, scaling
from .show import Ticker, tokens_a_second

if TYPE_CHECKING:
    from ...run.train import Config

WIDTH = 20
TITLES: dict[Kind, str] = {
    "strong": "strong: batch {} on all devices together",
    "weak": "weak: batch {} on {}, the same for each device elsewhere",
}


def show(
    config: "Config",
    target: Target,
    kinds: Sequence[Kind],
    *,
    batch: int | None = None,
    as_json: bool = False,
) -> dict[Kind, list[Point]]:
    """Prints and returns how the best plan scales, in each of the kinds.

    Args:
      batch: batch_size instead of the config's; for "weak" that of the target.
    """
    batch = config.batch_size if batch is None else batch
    with Ticker() as ticker:
        found: dict[Kind, list[Point]] = {
            kind: scaling(config, target, kind, batch=batch, progress=ticker)
            for kind in kinds
        }
    if as_json:
        print(
            json.dumps({k: [_json(p) for p in v] for k, v in found.items()}, indent=1)
        )
        return found
    for kind, points in found.items():
        title = TITLES[kind].format(batch, target.name)
        print_styled(f"{title}\n{table(points)}\n")
    return found


def table(points: Sequence[Point]) -> str:
    head = [
        "devices",
        "batch",
        "step",
        "tokens/s",
        "MFU",
        "efficiency",
        "",
        "best plan",
    ]
    rows = [head]
    most = max((p.efficiency or 0.0 for p in points), default=1.0)
    for point in points:
        row = [str(point.num_devices), str(point.batch)]
        rows.append([*row, *_cells(point, most)])
    return align(rows, right=range(6))


def _cells(point: Point, most: float) -> list[str]:
    plan, best = point.plan, point.best
    if plan is None or best is None or point.efficiency is None:
        return ["-", "-", "-", "-", "", _why_none(point)]
    choice = best.choice
    return [
        seconds_text(plan.roofline.step),
        f"{tokens_a_second(plan):,.0f}",
        f"<= {plan.mfu:.0%}",
        f"{point.efficiency:.0%}",
        bar(point.efficiency / most, WIDTH),
        f"{choice.mesh}, {choice.in_parts}, remat {choice.remat}",
    ]


def _why_none(point: Point) -> str:
    if not point.found.candidates:
        return f"no mesh divides batch {point.batch}"
    return f"nothing fits: {why_not(point.found.leanest())}"


def _json(point: Point) -> dict[str, Any]:
    facts: Mapping[str, Any] = point.plan.to_json() if point.plan else {}
    return {
        "target": point.found.target.name,
        "devices": point.num_devices,
        "batch_size": point.batch,
        "efficiency": point.efficiency,
        "best": facts or None,
    }
