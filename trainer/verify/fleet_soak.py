"""The numbers of a soak of learners: many faults at random, see fleet_drill.py."""

import statistics
from collections.abc import Sequence
from typing import Any

from ...sharding.text import align
from .fleet_drill import Training, has_failed, verdict


def summary(trainings: Sequence[Training], faults: int) -> dict[str, Any]:
    """Returns what a soak has found; times are in seconds.

    Goodput compares the rounds that are in an update, a second, with those a second
    while there was no fault: from each recovery to the next fault.
    """
    results = [result for training in trainings for result in training.results]
    times = sorted(r.seconds for r in results if r.seconds is not None)
    commits = sorted(r.next_commit for r in results if r.next_commit is not None)
    done = [training for training in trainings if not training.problem]
    clear = sum(t.clear_seconds for t in done)
    found: dict[str, Any] = {"faults": faults, "recovered": len(times)}
    found |= {"trainings": len(trainings), "passed": len(done)}
    for name, values in (("recovery", times), ("next_commit", commits)):
        if values:
            found[f"{name}_median"] = statistics.median(values)
            found[f"{name}_p95"] = values[min(len(values) - 1, int(0.95 * len(values)))]
    rounds, seconds = sum(t.rounds for t in done), sum(t.seconds for t in done)
    if clear and seconds:
        best = sum(t.clear_rounds for t in done) / clear
        found["goodput"] = rounds / seconds / best if best else None
    for name in ("commits", "taken_back", "samples"):
        found[name] = sum(getattr(training, name) for training in done)
    found["verdicts"] = [verdict(t) for t in trainings if t.problem]
    found["is_passed"] = not has_failed(trainings) and len(times) == faults
    return found


def describe(found: dict[str, Any]) -> str:
    """Formats the summary."""
    rows = [
        ("faults recovered from", f"{found['recovered']} of {found['faults']}"),
        (
            "trainings audited and replayed",
            f"{found['passed']} of {found['trainings']}",
        ),
        ("commits", f"{found['commits']:,}, {found['taken_back']:,} taken back"),
        ("samples", f"{found['samples']:,}, each in one update"),
    ]
    for name, what in (("next_commit", "next commit"), ("recovery", "recovery")):
        if f"{name}_median" in found:
            rows.append((f"{what}, median", f"{found[f'{name}_median']:.1f} s"))
            rows.append((f"{what}, 95th percentile", f"{found[f'{name}_p95']:.1f} s"))
    if found.get("goodput") is not None:
        rows.append(("goodput", f"{100 * found['goodput']:.0f} %"))
    end = "soak: every audit is clean and every replay bit-equal"
    if not found["is_passed"]:
        end = "\n".join(["soak: FAILED", *(f"  {line}" for line in found["verdicts"])])
    return f"{align(rows)}\n{end}"
