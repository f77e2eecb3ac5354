"""`meshloom plan --scale` as text, JSON and a picture."""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from ....sharding.text import align
from ..hardware import parse_target
from ..show import DOES_NOT_FIT
from ..text import bar, print_styled, seconds_text
from .reasons import why_not
from .scaling import Kind, Point, scaling
from .scaling_picture import svg
from .show import Ticker, load, tokens_a_second

WIDTH = 20
TITLES: dict[Kind, str] = {
    "strong": "strong: batch {} on all devices together",
    "weak": "weak: batch {} on {}, the same for each device elsewhere",
}


def show(args: Namespace) -> int | None:
    """Prints the tables of the flags; the exit status says whether anything fits."""
    config, target = load(args), parse_target(args.target)
    batch = config.batch_size if args.batch is None else args.batch
    with Ticker() as ticker:
        found: dict[Kind, list[Point]] = {
            kind: scaling(config, target, kind, batch=batch, progress=ticker)
            for kind in TITLES
            if args.scale in (kind, "both")
        }
    if args.json:
        print(
            json.dumps({k: [_json(p) for p in v] for k, v in found.items()}, indent=1)
        )
    else:
        for kind, points in found.items():
            title = TITLES[kind].format(batch, target.name)
            print_styled(f"{title}\n{table(points)}\n")
    if args.svg is not None:
        name = (args.config or ["default"])[-1]
        args.svg.write_text(svg(found, f"{name} on {target.device.name}"))
        print(f"Wrote {args.svg}", file=sys.stderr)
    fits = any(p.plan is not None for points in found.values() for p in points)
    return None if fits else DOES_NOT_FIT


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
