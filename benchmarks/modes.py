"""Trains every mode of learners with real processes, and compares them.

    python benchmarks/modes.py [--configs default] [--modes sync async] [--seeds 3]
    python benchmarks/modes.py --slow 1x4 [--configs drill] [--seeds 1]

Each training is a fleet of `meshloom launch local`: a coordinator, two servers and
four learners. The parameters that the servers hold are evaluated on held-out
examples, the same for all modes and seeds. Modes are compared at equal samples: all
use as many as `sync` in its steps, those that drop contributions by training for more
steps. Where a training ends early, the table says how many samples it has used.

With --slow, every mode is trained twice: with learners that are alike, and with one
that is four times slower (SIGSTOP most of the time). On one machine the others would
get the cores that it leaves, so all learners run in time slots (modes_slots.py): each
has --share of a core, whatever the others do. This shows what waiting costs: steps a
second that the others lose, and the time until a loss is reached. The table says how
busy the cores of this machine were: near 100 %, learners waited for a core, not for
each other. It does not show the speed of learners on machines of their own. A learner
answers only in its slots, so a mode with an exchange after each step does at most one
or two steps in each period.

Trainings that --folder has results of are skipped, so the command can be repeated
after an interruption. It writes results.json, tables and plots there.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from modes_cases import SIZES, Case, all_cases, parse_slow
from modes_fleet import Failed, trained
from modes_results import Judge, Result, measure
from modes_tables import curves, losses, stragglers

from meshloom.launch.atomic_file import replace_text
from meshloom.service.rounds.policy import PRESETS
from meshloom.sharding.text import seconds_text
from meshloom.trainer.verify import compare_plot


class Store:
    """The results of all cases so far, in one file."""

    def __init__(self, path: Path):
        self._path = path
        self._rows: dict[str, Any] = {}
        if path.exists():
            self._rows = json.loads(path.read_text())

    def find(self, case: Case) -> Result | None:
        """Returns the result of a case; refuses one of other settings."""
        row = self._rows.get(case.name)
        if row is None:
            return None
        for name, expected in case.to_json().items():
            if (found := row["case"].get(name)) != expected:
                raise ValueError(
                    f"{self._path}: {case.name} was trained with {name}={found!r}, "
                    f"expected {expected!r}; give another --folder"
                )
        return Result.from_json(row["result"])

    def initial_loss(self, case: Case) -> float:
        return self._rows[case.name]["initial_loss"]

    def facts(self, case: Case) -> dict[str, Any]:
        """Returns everything that was added of a case."""
        return self._rows[case.name]

    def add(self, case: Case, result: Result, **facts: Any) -> None:
        row = {"case": case.to_json(), "result": result.to_json(), **facts}
        self._rows[case.name] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._path, json.dumps(self._rows, indent=1) + "\n")


def train_all(
    cases: Sequence[Case], store: Store, folder: Path, rows: int
) -> list[tuple[Case, str]]:
    """Trains what has no result yet; returns what has failed."""
    left = [case for case in cases if store.find(case) is None]
    print(f"{len(cases)} trainings, {len(cases) - len(left)} of them done before")
    failed, judges, began = [], {}, time.monotonic()
    for number, case in enumerate(left, start=1):
        start = time.monotonic()
        if (key := (case.config, case.sets)) not in judges:
            judge = Judge(case, rows)
            judges[key] = judge, judge.initial_loss()
        judge, initial = judges[key]
        try:
            with trained(case, folder) as found:
                middle = time.monotonic()
                result = measure(case, found, judge)
        except Failed as error:
            failed.append((case, str(error)))
            print(f"{case.name}: {error}", flush=True)
            continue
        seconds = time.monotonic() - start
        facts = {"wall_seconds": seconds, "fleet_seconds": middle - start}
        store.add(case, result, initial_loss=initial, eval_rows=rows, **facts)
        rest = (time.monotonic() - began) / number * (len(left) - number)
        print(
            f"[{number}/{len(left)}] {case.name}: {result.loss:.4f} after "
            f"{result.samples} samples; {seconds:.0f} s, {result.seconds:.0f} of them "
            f"training and {facts['wall_seconds'] - facts['fleet_seconds']:.0f} "
            f"evaluating; about {seconds_text(rest)} left",
            flush=True,
        )
    return failed


def show(cases: Sequence[Case], store: Store, folder: Path, is_slow: bool) -> None:
    """Prints and writes a table and a plot of each config."""
    found = [(case, store.find(case)) for case in cases]
    for config in dict.fromkeys(case.config for case in cases):
        runs = [(c, r) for c, r in found if r is not None and c.config == config]
        if not runs:
            continue
        if is_slow:
            done = {(c.mode, c.seed) for c, _ in runs if not c.slow}
            runs = [(c, r) for c, r in runs if (c.mode, c.seed) in done]
            text = stragglers(runs, store.initial_loss(runs[0][0]))
            lines = curves([(c, r) for c, r in runs if c.slow])
        else:
            text, lines = losses(runs), curves(runs)
        name = f"{config}-slow" if is_slow else config
        print(f"\n{name}\n\n{text}")
        (folder / f"{name}.txt").write_text(text + "\n")
        plot = compare_plot.svg(lines, "seconds")
        (folder / f"{name}.svg").write_text(plot, encoding="utf-8")
    print(f"\nTables, plots and results.json are in {folder}.")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", nargs="+", default=["default"])
    parser.add_argument("--modes", nargs="+", default=list(PRESETS), choices=PRESETS)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, help=f"of sync; known for {list(SIZES)}")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--points", type=int, default=8, help="versions evaluated")
    parser.add_argument("--eval-rows", type=int, default=128)
    parser.add_argument("--slow", type=parse_slow, metavar="NxF")
    parser.add_argument("--share", type=float, default=0.3, help="of a core, in slots")
    parser.add_argument("--folder", type=Path, default=Path("build/modes"))
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    # So that what was started is ended when we are told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = args.folder.absolute()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    cases = list(
        all_cases(
            args.configs,
            args.modes,
            args.seeds,
            learners=args.learners,
            steps=args.steps,
            points=args.points,
            sets=args.set,
            share=args.share,
            slow=args.slow,
        )
    )
    store = Store(folder / "results.json")
    failed = train_all(cases, store, folder, args.eval_rows)
    show(cases, store, folder, args.slow is not None)
    for case, reason in failed:
        print(f"failed: {case.name}: {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
