"""Tries products of meshes, plans, schedules, models and data that nobody lists.

python tests/fuzz '{"layout": {"mesh": "pipe=2,fsdp=3"}}'   one case, in this process
python tests/fuzz --minutes 60                              cases by chance
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "support")]

import fuzz_worker  # noqa: E402
from fuzz_cases import Case  # noqa: E402

FAILURES = FOLDER.parents[1] / "build" / "fuzz" / "failures.jsonl"
ROUND = 16  # cases of one seed
PROCESSES_EVERY = 5  # rounds; these cases take three times as long


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("case", nargs="?", help="a case as JSON; runs it and no other")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--seed", type=int, help="of the first round; default by chance"
    )
    parser.add_argument("--limit", type=float, default=fuzz_worker.LIMIT)
    parser.add_argument("--processes", action="store_true", help="only such cases")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        fuzz_worker.set_up(8)
        fuzz_worker.serve()
        return 0
    if args.case is not None:
        return run_one(Case.from_json(args.case), args.limit, joined=args.process)
    # As Ctrl-C, so that the worker is ended too; hypothesis keeps SystemExit to itself.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = random.randrange(2**32) if args.seed is None else args.seed
    fuzz = Fuzz(args.limit, time.monotonic() + 60 * args.minutes)
    return fuzz.run(seed, always=args.processes)


def run_one(case: Case, limit: float, *, joined: bool) -> int:
    """Runs a case here; one of several processes starts them, or is one of them."""
    if case.processes > 1 and not joined:
        outcome = fuzz_worker.run_processes(case, limit)
    elif joined:
        fuzz_worker.set_up(case.layout.num_devices // case.processes)
        from meshloom.trainer.job import joining

        joining.join(os.environ)
        joining.connect()
        outcome = fuzz_worker.run(case)
    else:
        fuzz_worker.set_up(8)
        outcome = fuzz_worker.run(case)
    if joined:
        answer = {"status": outcome.status, "message": outcome.message}
        print(fuzz_worker.ANSWER + json.dumps(answer), flush=True)
    else:
        print(f"{outcome.status}: {outcome.message}" if outcome.message else "ok")
    return 0 if outcome.is_good else 1


class Fuzz:
    """Rounds of cases until the time is over; failures are kept, each kind once."""

    def __init__(self, limit: float, deadline: float):
        self._worker = fuzz_worker.Worker(limit)
        self._deadline = deadline
        self._counts: collections.Counter[str] = collections.Counter()
        self._known: set[str] = set()

    def run(self, seed: int, *, always: bool) -> int:
        number = 0
        try:
            while time.monotonic() < self._deadline:
                processes = always or number % PROCESSES_EVERY == PROCESSES_EVERY - 1
                self._round(seed + number, processes=2 if processes else 1)
                number += 1
                print(f"seed {seed + number - 1}: {self._told()}", flush=True)
        finally:
            self._worker.close()
        if self._known:
            print(f"{len(self._known)} kinds of failures, in {FAILURES}")
        return 1 if self._known else 0

    def _told(self) -> str:
        total = sum(n for name, n in self._counts.items() if name.startswith("ended"))
        parts = (f"{name} {num}" for name, num in sorted(self._counts.items()))
        return f"{total} cases; {', '.join(parts)}"

    def _round(self, seed: int, *, processes: int) -> None:
        from fuzz_explore import explore
        from fuzz_legal import cases

        found = explore(
            self._run,
            cases(processes=processes),
            num_cases=ROUND if processes == 1 else ROUND // 4,
            seed=seed,
            is_over=lambda: time.monotonic() > self._deadline,
            is_known=lambda outcome: outcome.kind in self._known,
        )
        if found:
            self._keep(*found)

    def _run(self, case: Case) -> fuzz_worker.Outcome:
        outcome = self._worker.run(case)
        self._counts[f"ended {outcome.status}"] += 1
        self._counts[case.kind] += 1
        return outcome

    def _keep(self, case: Case, outcome: fuzz_worker.Outcome) -> None:
        self._known.add(outcome.kind)
        print(f"FAILED {outcome.message}\nRun it again: {case.command}", flush=True)
        FAILURES.parent.mkdir(parents=True, exist_ok=True)
        with FAILURES.open("a") as file:
            row = {"command": case.command, "message": outcome.message}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
