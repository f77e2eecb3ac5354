"""Trains learners with and without compression, and compares bytes and losses.

    python benchmarks/compress.py [--config digits] [--steps 200] [--seeds 3]

Each training is a fleet of `meshloom launch local`, as in modes.py: a coordinator, two
servers and --learners learners. (This file is not called compression.py, which would
hide a module of Python's own that jax looks for.)

Bytes are those of the arrays that learners have sent and received, all elements of
version 0 included, and the pull after the last round not; they must be equal to what
the layout says. tests/service/test_bytes.py compares such bytes with those on the
sockets. The table has the means over the seeds. A loss is within the noise if it is
above that of `dense` by no more than the range of `dense` over its seeds.

Trainings that --folder has results of are skipped, so the command can be repeated
after an interruption. It says how busy the cores of the machine were, whoever used
them; bytes and losses do not depend on that, since all modes here are in lockstep.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from modes import Store
from modes_cases import SIZES, Case, Size
from modes_fleet import Failed, Trained, trained
from modes_results import Judge, Result, measure
from modes_slots import busy_share, core_ticks

from meshloom.service.blocks.layout import Layout
from meshloom.service.rounds.policy import Policy, make_policy
from meshloom.service.wire import codecs
from meshloom.sharding.text import align, human_bytes
from meshloom.trainer.record import metrics

DENSE = "dense"
# The mode, the local steps, and how pushes and pulls are packed.
KINDS = {
    DENSE: ("sync", 1, "float32", "float32"),
    "bfloat16": ("sync", 1, "bfloat16", "bfloat16"),
    "int8": ("sync", 1, "int8", "int8"),
    "topk": ("sync", 1, "topk:0.01", "int8"),
    "topk-int8": ("sync", 1, "topk:0.01+int8", "int8"),
    "local": ("local-sgd", 100, "float32", "float32"),
    "local-int8": ("local-sgd", 100, "int8", "int8"),
    "local-topk-int8": ("local-sgd", 100, "topk:0.01+int8", "int8"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing(Case):
    """A training with a kind of compression."""

    kind: str
    local_steps: int
    push: str
    pull: str

    @property
    def name(self) -> str:
        return f"{self.config}-{self.kind}-{self.seed}"

    @property
    def policy(self) -> Policy:
        return make_policy(self.mode, local_steps=self.local_steps)

    @property
    def bindings(self) -> list[str]:
        own = {"local_steps": self.local_steps, "push": self.push, "pull": self.pull}
        return [*super().bindings, *(f"exchange.{k}={x!r}" for k, x in own.items())]


def all_cases(args: argparse.Namespace) -> Iterator[Packing]:
    """Yields what to train: seeds of a kind far from each other, dense first."""
    sets = SIZES.get(args.config, Size(0)).sets
    sets = tuple(x for x in sets if not x.startswith("exchange.local_steps"))
    for seed in range(args.seeds):
        for kind in args.kinds:
            mode, local_steps, push, pull = KINDS[kind]
            case = Packing(
                **{"config": args.config, "mode": mode, "seed": seed},
                **{"steps": args.steps, "learners": args.learners, "points": 1},
                **{"kind": kind, "local_steps": local_steps, "push": push},
                **{"pull": pull, "sets": (*sets, *args.set)},
            )
            case.policy.num_rounds(case.steps)  # raises if the last is not exchanged
            yield case


def moved(case: Packing, found: Trained) -> dict[str, int]:
    """Returns the bytes that a learner has sent and received, and checks them."""
    rounds = case.policy.num_rounds(case.steps)
    spec = json.loads((found.run / "spec.json").read_text())
    layout = Layout.from_json(spec["layout"])
    boxes = [slab.box for block in layout.blocks for slab in block.slabs]
    push, pull = codecs.parse(case.push), codecs.parse(case.pull)
    dense = sum(layout.block_bytes(block.index) for block in layout.blocks)
    change = dense if pull.is_plain else sum(map(pull.nbytes, boxes))
    expected = {
        "sent": rounds * sum(map(push.nbytes, boxes)),
        "received": dense + (rounds - 1) * change,
    }
    for learner in range(case.learners):
        rows = metrics.read(found.learner(learner) / "metrics.jsonl")
        own = {
            "sent": sum(row.get("pushed_bytes", 0) for row in rows),
            "received": sum(row.get("pulled_bytes", 0) for row in rows),
        }
        if own != expected:
            raise Failed(f"learner {learner} has moved {own}, expected {expected}")
    return expected


def train_all(
    cases: Sequence[Packing], store: Store, folder: Path, rows: int
) -> list[str]:
    """Trains what has no result yet; returns what has failed."""
    left = [case for case in cases if store.find(case) is None]
    print(f"{len(cases)} trainings, {len(cases) - len(left)} of them done before")
    failed: list[str] = []
    judge = Judge(cases[0], rows)
    initial = judge.initial_loss()
    for number, case in enumerate(left, start=1):
        start, before = time.monotonic(), core_ticks()
        try:
            with trained(case, folder) as found:
                busy = busy_share(before, core_ticks())
                bytes_of = moved(case, found)
                result = measure(case, found, judge)
        except Failed as error:
            failed.append(f"{case.name}: {error}")
            print(failed[-1], flush=True)
            continue
        facts = {"bytes": bytes_of, "busy": busy, "load": os.getloadavg()[0]}
        store.add(case, result, initial_loss=initial, eval_rows=rows, **facts)
        print(
            f"[{number}/{len(left)}] {case.name}: {result.loss:.4f}, "
            f"{sum(bytes_of.values())} bytes, {time.monotonic() - start:.0f} s, cores "
            f"{100 * busy:.0f} % busy",
            flush=True,
        )
    return failed


def table(cases: Sequence[Packing], store: Store) -> str:
    """Returns the table of what has results."""
    kinds: dict[str, list[tuple[Packing, Result, dict]]] = {}
    for case in cases:
        if (result := store.find(case)) is not None:
            kinds.setdefault(case.kind, []).append((case, result, store.facts(case)))
    losses = {c.seed: r.loss for c, r, _ in kinds.get(DENSE, [])}
    dense = [sum(f["bytes"].values()) for _, _, f in kinds.get(DENSE, [])]
    noise = max(losses.values()) - min(losses.values()) if losses else 0.0
    head = "push|pull|local steps|commits|sent|received|fewer bytes|held-out loss"
    rows = [[*head.split("|"), "over seeds", "above dense", "within noise"]]
    for kind, runs in kinds.items():
        case, result, facts = runs[0]
        found = [r.loss for _, r, _ in runs]
        above = [r.loss - losses[c.seed] for c, r, _ in runs if c.seed in losses]
        fewer = dense[0] / sum(facts["bytes"].values()) if dense else 0.0
        is_compared = bool(above) and kind != DENSE and len(losses) > 1
        excess = statistics.mean(above) if is_compared else 0.0
        rows.append(
            [
                *(case.push, case.pull, str(case.local_steps), str(result.commits)),
                *map(human_bytes, facts["bytes"].values()),
                f"{fewer:.1f} x" if dense else "-",
                f"{statistics.mean(found):.4f}",
                f"{min(found):.4f} to {max(found):.4f}",
                f"{excess:+.4f}" if is_compared else "-",
                ("yes" if excess <= noise else "no") if is_compared else "-",
            ]
        )
    busy = [f["busy"] for runs in kinds.values() for *_, f in runs]
    seeds = {len(runs) for runs in kinds.values()}
    about = (
        f"{cases[0].config}, {cases[0].steps} steps, {cases[0].learners} learners, "
        f"{'/'.join(map(str, sorted(seeds)))} seeds; noise {noise:.4f}; cores "
        f"{100 * min(busy):.0f} to {100 * max(busy):.0f} % busy"
    )
    return f"{align(rows, right=range(2, len(rows[0])))}\n{about}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="digits")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--steps", type=int, default=200, help="of each learner")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--eval-rows", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=Path("build/compression"))
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    # So that what was started is ended when we are told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = args.folder.absolute()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    cases = list(all_cases(args))
    store = Store(folder / "results.json")
    failed = train_all(cases, store, folder, args.eval_rows)
    text = table(cases, store)
    print(f"\n{text}\n\nThe table and results.json are in {folder}.")
    (folder / f"{args.config}.txt").write_text(text + "\n")
    for reason in failed:
        print(f"failed: {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
