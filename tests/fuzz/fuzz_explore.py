"""Draws cases, runs them, and shrinks the first that fails to a minimal one."""

from collections.abc import Callable
from typing import Any

from fuzz_cases import Case
from fuzz_worker import Outcome
from hypothesis import HealthCheck, event, given, settings
from hypothesis import seed as seeded

# hypothesis also tries examples that differ little from the last one, which is not
# worth compiling for: it draws so many for each that is run.
DRAWN = 8


def explore(
    run: Callable[[Case], Outcome],
    strategy: Any,
    *,
    num_cases: int,
    seed: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
    is_known: Callable[[Outcome], bool] = lambda outcome: False,
) -> tuple[Case, Outcome] | None:
    """Returns the minimal failing case of one round; None where all are good.

    Args:
      num_cases: to run, each with other layouts.
      seed: None draws the same cases every time.
      is_over: asked before each case, until one fails.
      is_known: whether a failure was found before, and is not worth shrinking again.
    """
    seen: set[str] = set()
    failing: list[tuple[Case, Outcome]] = []

    @settings(
        max_examples=DRAWN * num_cases,
        derandomize=seed is None,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(case: Case) -> None:
        key = repr((case.layouts, case.spoiled))
        if not failing:
            if key in seen or len(seen) >= num_cases or is_over():
                return
            seen.add(key)
        outcome = run(case)
        event(f"{case.kind}: {outcome.status}")
        if outcome.is_good or is_known(outcome):
            return
        if not failing:
            print(f"{outcome.message}\nShrinking: {case.command}", flush=True)
        failing.append((case, outcome))
        raise AssertionError(outcome.kind)

    try:
        (one if seed is None else seeded(seed)(one))()
    except Exception:  # of several failures hypothesis raises a group
        if not failing:
            raise
    return failing[-1] if failing else None
