"""`meshloom plan --search` and `--smallest` as text and JSON."""

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....sharding.text import align, human_bytes
from ...program.hardware import Target
from ..predict import Plan
from ..text import print_styled, seconds_text
from .finalists import Finalist, compile_finalist, table
from .reasons import reasons, why_not
from .searching import Candidate, Search, search
from .smallest import in_words, smallest

if TYPE_CHECKING:
    from ...run.train import Config

TOP, PARTS_SHOWN = 5, 3


def show(
    config: "Config",
    target: Target,
    *,
    batch: int | None = None,
    top: int = TOP,
    compiles: bool = False,
    as_json: bool = False,
) -> Search:
    """Searches, prints the best plans and returns all that was found.

    Args:
      batch: batch_size instead of the config's.
      top: how many plans are shown.
      compiles: compiles these for the target too.
    """
    with Ticker() as ticker:
        found = search(config, target, batch=batch, progress=ticker)
    if found.best is None:
        _show_nothing_fits(found, as_json)
        return found
    chosen = found.finalists(top)
    plans = [found.plan(c) for c in chosen]
    compiled: list[Finalist] = []
    if not as_json:
        print_styled(f"{counted(found)}\n\n{best_table(found, chosen)}")
        print_styled("\n".join(["\nWhy others lost", *_lines(reasons(found))]))
    if compiles:
        for number, plan in enumerate(plans, 1):
            words = f"Compiling {number} of {len(plans)}: {plan.case.spec}"
            print(words, file=sys.stderr, flush=True)
            compiled.append(compile_finalist(plan))
    if as_json:
        print(json.dumps(_json(found, plans, compiled), indent=1))
    elif compiled:
        print_styled(f"\n{table(compiled)}")
    return found


def show_smallest(
    config: "Config",
    target: Target,
    *,
    batch: int | None = None,
    as_json: bool = False,
) -> Search | None:
    """Prints and returns the best plan on the fewest devices; None if none will do."""
    with Ticker() as ticker:
        found = smallest(config, target, batch=batch, progress=ticker)
    if found is None or found.best is None:
        print_styled(in_words(None, target))
        return None
    if as_json:
        print(json.dumps(_json(found, [found.plan(found.best)], []), indent=1))
    else:
        print_styled(f"{in_words(found, target)}\n\n{best_table(found, [found.best])}")
    return found


def counted(found: Search) -> str:
    config, target = found.config, found.target
    return (
        f"{target.name}: {len(found.candidates):,} plans on {found.num_meshes} meshes "
        f"looked at in {found.took:.1f} s, {len(found.fitting):,} fit; batch "
        f"{config.batch_size}, plan {config.plan}"
    )


def best_table(found: Search, candidates: Sequence[Candidate]) -> str:
    head = ("best", "mesh", "in parts", "remat", "step", "tokens/s", "MFU", "memory")
    rows: list[tuple[str, ...]] = [(*head, "of the step")]
    for number, candidate in enumerate(candidates, 1):
        plan, choice = found.plan(candidate), candidate.choice
        share = plan.memory.peak / plan.target.device.usable
        rows.append(
            (
                f"  {number}",
                str(choice.mesh),
                choice.in_parts,
                str(choice.remat),
                seconds_text(plan.roofline.step),
                f"{tokens_a_second(plan):,.0f}",
                f"<= {plan.mfu:.0%}",
                f"{share:.0%}",
                largest_parts(plan),
            )
        )
    return align(rows, right=(4, 5, 6, 7))


def tokens_a_second(plan: Plan) -> float:
    return plan.case.length / plan.seconds_an_example


def largest_parts(plan: Plan) -> str:
    total = plan.roofline.step
    parts = sorted(plan.roofline.waits.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name.removeprefix('network, ')} {seconds / total:.0%}"
        for name, seconds in parts[:PARTS_SHOWN]
        if seconds / total >= 0.005
    )


def _lines(items: Sequence[Any]) -> list[str]:
    return [f"  {item}" for item in items]


def _show_nothing_fits(found: Search, as_json: bool) -> None:
    if not found.candidates:
        num, rows = found.target.num_devices, found.config.batch_size
        raise ValueError(
            f"--search: no mesh of {num} devices divides the layers, heads, hidden "
            f"units and vocabulary of the model and batch {rows}. Take another --batch "
            "or --target."
        )
    lean = found.leanest()
    with Ticker() as ticker:
        num = found.target.num_devices
        least = smallest(found.config, found.target, more_than=num, progress=ticker)
    if as_json:
        document = _json(found, [], [])
        document["leanest"] = lean.to_json()
        document["smallest"] = least and least.target.name
        print(json.dumps(document, indent=1))
        return
    over = human_bytes(lean.memory.peak - lean.target.device.usable)
    lines = [
        counted(found),
        "",
        f"Nothing fits. The leanest plan, {lean.case.spec}, is {over} too large on "
        f"each device: {why_not(lean)}.",
        in_words(least, found.target),
    ]
    print_styled("\n".join(lines))


def _json(
    found: Search, plans: Sequence[Plan], compiled: Sequence[Finalist]
) -> dict[str, Any]:
    return {
        "target": found.target.name,
        "devices": found.target.num_devices,
        "plans": len(found.candidates),
        "meshes": found.num_meshes,
        "fit": len(found.fitting),
        "seconds": found.took,
        "best": [
            plan.to_json() | {"mesh_flag": str(plan.case.spec), **_schedule(plan)}
            for plan in plans
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


def _schedule(plan: Plan) -> dict[str, Any]:
    if plan.case.pipeline is None:
        return {"schedule": None, "num_chunks": None}
    schedule = plan.case.pipeline.schedule
    return {"schedule": schedule.name, "num_chunks": schedule.num_chunks}


class Ticker:
    """A line on a terminal, for searches that take longer than a second."""

    def __init__(self):
        self._begin, self._next, self._width = time.perf_counter(), 1.0, 0

    def __enter__(self) -> "Ticker":
        return self

    def __call__(self, num: int, num_fit: int) -> None:
        passed = time.perf_counter() - self._begin
        if passed > self._next and sys.stderr.isatty():
            self._next = passed + 0.2
            self._tell(f"{num:,} plans looked at, {num_fit:,} fit")

    def __exit__(self, *_) -> None:
        if self._width:
            self._tell("")
            print(end="\r", file=sys.stderr, flush=True)

    def _tell(self, text: str) -> None:
        print(f"\r{text:{self._width}}", end="", file=sys.stderr, flush=True)
        self._width = max(self._width, len(text))
