"""Tables and curves of the results of modes."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from modes_cases import Case
from modes_results import Result

from meshloom.service.rounds.policy import PRESETS
from meshloom.sharding.text import align, seconds_text
from meshloom.trainer.verify.compare import REFERENCE, Point

Runs = Sequence[tuple[Case, Result]]
# The loss that is timed: `sync` has made this share of its way there.
PROGRESS = 0.95


@dataclasses.dataclass(frozen=True)
class Curve:
    mode: str
    points: tuple[Point, ...]


def by_mode(runs: Runs) -> dict[str, dict[int, tuple[Case, Result]]]:
    """Returns the runs of each mode by seed."""
    found: dict[str, dict[int, tuple[Case, Result]]] = {mode: {} for mode in PRESETS}
    for case, result in runs:
        found[case.mode][case.seed] = case, result
    return {mode: seeds for mode, seeds in found.items() if seeds}


def losses(runs: Runs) -> str:
    """Returns the table of final losses.

    "above sync" is the mean over seeds of the difference to `sync` with the same seed;
    it is noise if it is not more than the range of the losses of `sync`.
    """
    modes = by_mode(runs)
    reference = {s: r.loss for s, (_, r) in modes.get(REFERENCE, {}).items()}
    samples = {s: r.samples for s, (_, r) in modes.get(REFERENCE, {}).items()}
    noise = max(reference.values()) - min(reference.values()) if reference else 0.0
    head = "mode|seeds|steps|samples|of sync's|commits|dropped|staleness mean, max"
    table = [
        [*head.split("|"), "held-out loss", "over seeds", "above sync", "within noise"]
    ]
    for mode, seeds in modes.items():
        cases, results = zip(*seeds.values(), strict=True)
        found = [r.loss for r in results]
        above = [r.loss - reference[s] for s, (_, r) in seeds.items() if s in reference]
        shares = [r.samples / samples[s] for s, (_, r) in seeds.items() if s in samples]
        excess = statistics.mean(above) if above else None
        oldest = max(r.staleness[1] for r in results)
        is_compared = excess is not None and mode != REFERENCE and len(reference) > 1
        table.append(
            [
                mode,
                str(len(results)),
                str(cases[0].steps),
                f"{statistics.mean(r.samples for r in results):.0f}",
                f"{100 * statistics.mean(shares):.1f} %" if shares else "-",
                f"{statistics.mean(r.commits for r in results):.0f}",
                f"{statistics.mean(r.dropped for r in results):.0f}",
                f"{statistics.mean(r.staleness[0] for r in results):.2f}, {oldest}",
                f"{statistics.mean(found):.4f}",
                f"{min(found):.4f} to {max(found):.4f}",
                "-" if excess is None or mode == REFERENCE else f"{excess:+.4f}",
                ("yes" if excess <= noise else "no") if is_compared else "-",
            ]
        )
    return align(table, right=range(1, len(table[0])))


def stragglers(runs: Runs, initial: float) -> str:
    """Returns the table of what slow learners cost, in medians over the seeds."""
    even = by_mode([(c, r) for c, r in runs if not c.slow])
    slowed = by_mode([(c, r) for c, r in runs if c.slow])
    head = "mode|others' steps/s|with a slow one|lost|slow one's share|cores busy"
    table = [[*head.split("|"), "held-out loss", "time to loss", "with a slow one"]]
    for mode, seeds in slowed.items():
        pairs = [(even[mode][s][1], r, c) for s, (c, r) in seeds.items()]
        rates = [(_others(a, c), _others(b, c)) for a, b, c in pairs]
        busy = max(result.busy for pair in pairs for result in pair[:2])
        shares = [b.rates[-1] / _others(b, c) for _, b, c in pairs]
        table.append(
            [
                mode,
                f"{statistics.median(a for a, _ in rates):.2f}",
                f"{statistics.median(b for _, b in rates):.2f}",
                f"{100 * statistics.median(1 - b / a for a, b in rates):.1f} %",
                f"{statistics.median(shares):.2f}",
                f"{100 * busy:.0f} %",
                f"{statistics.median(b.loss for _, b, _ in pairs):.4f}",
                _time([a for a, _, _ in pairs], seeds, even, initial),
                _time([b for _, b, _ in pairs], seeds, even, initial),
            ]
        )
    return align(table, right=range(1, len(table[0])))


def _others(result: Result, case: Case) -> float:
    """Returns the steps a second of the learners that are not slow ones."""
    return statistics.mean(result.rates[: case.learners - case.slow])


def _time(
    results: Sequence[Result],
    seeds: Mapping[int, object],
    even: Mapping[str, Mapping[int, tuple[Case, Result]]],
    initial: float,
) -> str:
    """Returns the median time to almost the loss of `sync`, learners being alike."""
    found = []
    for seed, result in zip(seeds, results, strict=True):
        if seed not in even.get(REFERENCE, {}):
            return "-"
        target = initial - PROGRESS * (initial - even[REFERENCE][seed][1].loss)
        seconds = result.seconds_to(target, initial)
        if seconds is None:
            return "not reached"
        found.append(seconds)
    return seconds_text(statistics.median(found))


def curves(runs: Runs) -> list[Curve]:
    """Returns the losses of each mode over samples and time, means over the seeds.

    Between versions that were evaluated, loss and time are interpolated.
    """
    found = []
    for mode, seeds in by_mode(runs).items():
        results = [result for _, result in seeds.values()]
        last = min(result.samples for result in results)
        grid = sorted({p[0] for p in results[0].points if p[0] < last} | {last})
        first = max(result.points[0][0] for result in results)
        grid = [x for x in grid if x >= first]
        columns = [np.array(result.points).T for result in results]
        seconds = np.mean([np.interp(grid, x, t) for x, t, _ in columns], axis=0)
        values = np.mean([np.interp(grid, x, y) for x, _, y in columns], axis=0)
        points = zip(grid, seconds.tolist(), values.tolist(), strict=True)
        found.append(Curve(mode, tuple(Point(*point) for point in points)))
    return found
