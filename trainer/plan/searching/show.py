"""`meshloom plan --search`, `--smallest` and `--scale` as text and JSON."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ....sharding.text import align, human_bytes, seconds_text
from ...program.hardware import Target
from ..compile.compiled import Finalist, compile_finalist, table
from ..predict import Forecast
from ..show import bar, print_styled
from .reasons import reasons, why_not
from .searching import (
    Candidate,
    Kind,
    Progress,
    Search,
    in_words,
    scaling,
    search,
    smallest,
)

if TYPE_CHECKING:
    from ...run.train import Config

TOP, PARTS_SHOWN, WIDTH = 5, 3, 20
TITLES: dict[Kind, str] = {
    "strong": "strong: batch {} on all devices together",
    "weak": "weak: batch {} on {}, the same for each device elsewhere",
}


def show(
    config: "Config",
    target: Target,
    *,
    top: int = TOP,
    compiles: bool = False,
    as_json: bool = False,
) -> Search:
    """Searches, prints the best candidates and returns all that was found.

    Args:
      top: how many candidates are shown.
      compiles: compiles these for the target too.
    """
    with ticker() as progress:
        found = search(config, target, progress=progress)
    if found.best is None:
        _show_nothing_fits(found, as_json)
        return found
    best = found.finalists(top)
    forecasts = [found.forecast(c) for c in best]
    compiled: list[Finalist] = []
    if not as_json:
        print_styled(f"{summary(found)}\n\n{best_table(found, best)}")
        lines = [f"  {reason}" for reason in reasons(found)]
        print_styled("\n".join(["\nWhy others lost", *lines]))
    for number, each in enumerate(forecasts if compiles else (), 1):
        words = f"Compiling {number} of {len(forecasts)}: {each.case.spec}"
        print(words, file=sys.stderr, flush=True)
        compiled.append(compile_finalist(each))
    if as_json:
        print(json.dumps(_json(found, forecasts, compiled), indent=1))
    elif compiled:
        print_styled(f"\n{table(compiled)}")
    return found


def show_smallest(
    config: "Config", target: Target, *, as_json: bool = False
) -> Search | None:
    """Prints and returns the best on the fewest devices; None if nothing fits."""
    with ticker() as progress:
        found = smallest(config, target, progress=progress)
    if found is None or found.best is None:
        print_styled(in_words(None, target))
    elif as_json:
        print(json.dumps(_json(found, [found.forecast(found.best)]), indent=1))
    else:
        print_styled(f"{in_words(found, target)}\n\n{best_table(found, [found.best])}")
    return found


def show_scaling(
    config: "Config", target: Target, kinds: Sequence[Kind], *, as_json: bool = False
) -> dict[Kind, list[Search]]:
    """Prints and returns how the best candidate scales, in each of the kinds."""
    with ticker() as progress:
        found: dict[Kind, list[Search]] = {
            kind: scaling(config, target, kind, progress=progress) for kind in kinds
        }
    if as_json:
        document = {k: [_point_json(p) for p in v] for k, v in found.items()}
        print(json.dumps(document, indent=1))
        return found
    for kind, points in found.items():
        title = TITLES[kind].format(config.batch_size, target.name)
        print_styled(f"{title}\n{scaling_table(points)}\n")
    return found


def summary(found: Search) -> str:
    config, target = found.config, found.target
    return (
        f"{target.name}: {len(found.candidates):,} candidates on {found.num_meshes} "
        f"meshes looked at in {found.took:.1f} s, {len(found.fitting):,} fit; batch "
        f"{config.batch_size}, plan {config.plan}"
    )


def best_table(found: Search, candidates: Sequence[Candidate]) -> str:
    head = "best,mesh,in parts,remat,step,tokens/s,MFU,memory,of the step"
    rows: list[list[str]] = [[*head.split(",")]]
    for number, candidate in enumerate(candidates, 1):
        each, choice = found.forecast(candidate), candidate.choice
        share = each.memory.peak / each.target.device.usable
        row = [f"  {number}", str(choice.mesh), choice.in_parts, str(choice.remat)]
        rows.append([*row, *_speed(each), f"{share:.0%}", largest_parts(each)])
    return align(rows, right=(4, 5, 6, 7))


def scaling_table(points: Sequence[Search]) -> str:
    head = "devices,batch,step,tokens/s,MFU,efficiency,,best candidate"
    rows: list[list[str]] = [[*head.split(",")]]
    most = max((p.efficiency or 0.0 for p in points), default=1.0)
    for point in points:
        best = point.best_forecast
        if point.best is None or best is None or point.efficiency is None:
            cells = ["-", "-", "-", "-", "", _why_none(point)]
        else:
            choice = point.best.choice
            cells = [
                *_speed(best),
                f"{point.efficiency:.0%}",
                bar(point.efficiency / most, WIDTH),
                f"{choice.mesh}, {choice.in_parts}, remat {choice.remat}",
            ]
        rows.append(
            [str(point.target.num_devices), str(point.config.batch_size), *cells]
        )
    return align(rows, right=range(6))


def _speed(found: Forecast) -> list[str]:
    tokens = found.case.length / found.seconds_an_example
    step = seconds_text(found.roofline.step)
    return [step, f"{tokens:,.0f}", f"<= {found.mfu:.0%}"]


def _why_none(found: Search) -> str:
    if not found.candidates:
        return f"no mesh divides batch {found.config.batch_size}"
    return f"nothing fits: {why_not(found.leanest())}"


def largest_parts(found: Forecast) -> str:
    total = found.roofline.step
    parts = sorted(found.roofline.waits.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name.removeprefix('network, ')} {seconds / total:.0%}"
        for name, seconds in parts[:PARTS_SHOWN]
        if seconds / total >= 0.005
    )


def _show_nothing_fits(found: Search, as_json: bool) -> None:
    target, rows = found.target, found.config.batch_size
    if not found.candidates:
        raise ValueError(
            f"--search: no mesh of {target.num_devices} devices divides the layers, "
            f"heads, hidden units and vocabulary of the model and batch {rows}. Try "
            "another --batch or --target."
        )
    lean = found.leanest()
    with ticker() as progress:
        num = target.num_devices
        least = smallest(found.config, target, more_than=num, progress=progress)
    if as_json:
        more = {"leanest": lean.to_json(), "smallest": least and least.target.name}
        print(json.dumps(_json(found, []) | more, indent=1))
        return
    over = human_bytes(lean.memory.peak - target.device.usable)
    print_styled(
        f"{summary(found)}\n\nNothing fits. The leanest candidate, {lean.case.spec}, "
        f"is {over} too large on each device: {why_not(lean)}.\n"
        f"{in_words(least, target)}"
    )


def _json(
    found: Search, forecasts: Sequence[Forecast], compiled: Sequence[Finalist] = ()
) -> dict[str, Any]:
    schedules = [f.case.pipeline and f.case.pipeline.schedule for f in forecasts]
    return {
        "target": found.target.name,
        "devices": found.target.num_devices,
        "plans": len(found.candidates),
        "meshes": found.num_meshes,
        "fit": len(found.fitting),
        "seconds": found.took,
        "best": [
            each.to_json()
            | {
                "mesh_flag": str(each.case.spec),
                "schedule": schedule and schedule.name,
                "num_chunks": schedule and schedule.num_chunks,
            }
            for each, schedule in zip(forecasts, schedules, strict=True)
        ],
        "reasons": [
            {"kind": r.kind, "time": r.slower, "why": r.why, "text": str(r)}
            for r in reasons(found)
        ],
        "compiled": [
            {
                "compiled": f.compiled and f.compiled.to_json(),
                "refused": f.refused,
                "fits": f.fits,
                "seconds": f.seconds,
            }
            for f in compiled
        ],
    }


def _point_json(found: Search) -> dict[str, Any]:
    best = found.best_forecast
    return {
        "target": found.target.name,
        "devices": found.target.num_devices,
        "batch_size": found.config.batch_size,
        "efficiency": found.efficiency,
        "best": best and best.to_json(),
    }


@contextlib.contextmanager
def ticker() -> Iterator[Progress]:
    """Shows on a terminal how far a search is."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda num, num_fit: status.update(
            f"{num:,} candidates looked at, {num_fit:,} fit"
        )
