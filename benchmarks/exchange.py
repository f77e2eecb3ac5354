"""Measures what the service costs: a learner of its own, and the ordinary trainer.

    python benchmarks/exchange.py [--config default] [--rounds 5] [--steps 60]

Each round trains a config twice for the same steps: by `meshloom train`, and as a
fleet of one learner in mode `sync`, a coordinator and two servers, all on this
machine. The one that begins changes from round to round, so that other load hits both.
The step time of a training is the median after --warm-up steps, and the ratio is that
of the two trainings of a round. Both must have the same losses.

The table says where the time of a step goes: *exchange* is from the gradient on the
host to the next parameters there, and *waiting* the share of a step in which the
learner does nothing else. Figures are printed as JSON and written to --folder.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from modes_cases import BARE
from modes_fleet import PROGRAM, Failed, running
from rich.console import Console
from rich.table import Table

from meshloom.launch.atomic_file import replace_text
from meshloom.trainer.record import metrics

SETS = {"default": ("optimizer=@optimizers.AdamW()",)}
LIMIT_SECONDS = 900.0
# AdamW divides by the square root of the second moment: where that is tiny, the last
# bits of a gradient count.
MOST_DIFFERENCE = 1e-3
KINDS = ("alone", "service")


@dataclasses.dataclass(frozen=True)
class Steps:
    """Figures of one training: a number for each step after the warm-up.

    Attributes:
      exchange: seconds from the gradient to the next parameters; empty without.
      waited: the part of it in which the learner waited.
      moved: bytes that it sent and received in a step.
    """

    seconds: list[float]
    losses: list[float]
    exchange: list[float]
    waited: list[float]
    moved: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def waiting(self) -> float:
        """The share of the time that the learner waited."""
        return sum(self.waited) / sum(self.seconds)


def command(kind: str, args: argparse.Namespace, run: Path) -> list[str]:
    """Returns the command of a training."""
    words = ["train", "--config", args.config, "--workdir", str(run)]
    bindings = [*BARE, *SETS.get(args.config, ()), *args.set]
    for binding in (*bindings, f"num_steps={args.steps}"):
        words += ["--set", binding]
    if kind == "alone":
        return [*PROGRAM, *words, "--cpu-devices", "1"]
    fleet = ["launch", "local", "--learners", "1", "--servers", "2"]
    fleet += ["--cpu-devices", "1", "--save-commits", str(10 * args.steps), "--"]
    return [*PROGRAM, *fleet, *words, "--set", "exchange.mode='sync'"]


def train(kind: str, args: argparse.Namespace, number: int) -> Steps:
    """Trains once; returns the figures of its steps."""
    run = args.folder / f"{number}-{kind}"
    shutil.rmtree(run, ignore_errors=True)
    log = run.with_suffix(".log")
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(args.folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with running(command(kind, args, run), env, log) as process:
        try:
            status = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            late = f"{kind}: not done after {LIMIT_SECONDS:g} s, see {log}"
            raise Failed(late) from None
    if status:
        raise Failed(f"{kind}: exited with {status}, see {log}")
    home = run if kind == "alone" else run / "learners" / "0"
    rows = metrics.read(home / metrics.FILES["train"])
    shutil.rmtree(run)
    return figures(rows, args.warm_up)


def figures(rows: Sequence[Mapping[str, Any]], warm_up: int) -> Steps:
    pairs = zip(rows[warm_up - 1 :], rows[warm_up:], strict=False)
    seconds = [row["time"] - before["time"] for before, row in pairs]
    rows = rows[warm_up:]
    own = [row for row in rows if "exchange_s" in row]
    return Steps(
        seconds=seconds,
        losses=[row["loss"] for row in rows],
        exchange=[row["exchange_s"] for row in own],
        waited=[row["exchange_wait_s"] for row in own],
        moved=[row["pushed_bytes"] + row["pulled_bytes"] for row in own],
    )


def summary(rounds: Sequence[Mapping[str, Steps]], **facts: Any) -> dict[str, Any]:
    """Returns medians over rounds, and the ratio of each round."""
    ratios = [found["service"].median / found["alone"].median for found in rounds]
    for found in rounds:
        losses = found["alone"].losses, found["service"].losses
        apart = np.max(np.abs(np.divide(*losses) - 1))
        if not apart <= MOST_DIFFERENCE:
            raise Failed(
                f"the losses of both trainings differ by {apart:.2g} of their value, "
                f"expected at most {MOST_DIFFERENCE:g}: the ratio compares nothing"
            )

    def middle(kind: str, value: Callable[[Steps], float]) -> float:
        return round(statistics.median(value(found[kind]) for found in rounds), 4)

    return {
        **facts,
        "rounds": len(rounds),
        "alone_step_s": middle("alone", lambda x: x.median),
        "service_step_s": middle("service", lambda x: x.median),
        "service_over_alone": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "exchange_s": middle("service", lambda x: statistics.median(x.exchange)),
        "waited_s": middle("service", lambda x: statistics.median(x.waited)),
        "waiting": middle("service", lambda x: x.waiting),
        "bytes_a_step": int(middle("service", lambda x: statistics.median(x.moved))),
    }


def table(found: Mapping[str, Any]) -> Table:
    made = Table("", "median of rounds")
    made.add_row("step of the ordinary trainer", f"{found['alone_step_s']:.4f} s")
    made.add_row("step with the service", f"{found['service_step_s']:.4f} s")
    ratios = f"{min(found['ratios']):.3f} to {max(found['ratios']):.3f}"
    made.add_row("ratio", f"{found['service_over_alone']:.3f} ({ratios})")
    made.add_row("exchange", f"{found['exchange_s']:.4f} s")
    waiting = f"{100 * found['waiting']:.0f} % of the time"
    made.add_row("waiting", f"{found['waited_s']:.4f} s, {waiting}")
    made.add_row("sent and received", f"{found['bytes_a_step'] / 1e6:.2f} MB a step")
    return made


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="default")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=10, help="steps not counted")
    parser.add_argument("--folder", type=Path, default=Path("build/exchange"))
    args = parser.parse_args()
    if not 0 < args.warm_up < args.steps or args.rounds < 1:
        parser.error("expected --steps > --warm-up > 0, and --rounds > 0")
    return args


def main() -> int:
    args = parse_args()
    # So that what was started is ended when we are told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.folder = args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    rounds = []
    try:
        for number in range(args.rounds):
            order = KINDS if number % 2 else KINDS[::-1]
            found = {kind: train(kind, args, number) for kind in order}
            rounds.append(found)
            steps = (f"{kind} {found[kind].median:.4f} s" for kind in KINDS)
            print(f"round {number + 1}: {', '.join(steps)} a step", file=sys.stderr)
        result = summary(rounds, config=args.config, steps=args.steps)
    except Failed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    Console(stderr=True).print(table(result))
    print(json.dumps({"exchange": result}))
    replace_text(args.folder / "exchange.json", json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
