"""The real train step, compiled for a target that is not here, beside its plan.

It runs in a process of its own: libtpu makes every start of jax slower, and a compiler
that fails must not take the plan with it. The program's text is read from what the
compiler writes to a folder, since jax cannot read every program of a newer libtpu.
"""

import dataclasses
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...sharding.text import align, human_bytes
from .predict import Plan
from .program import model_program
from .traffic import by_axes

MODULE = "meshloom.trainer.plan.compile_worker"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a step, of one device.

    Attributes:
      peak: the most bytes alive at once; `reserved` is arguments and the heap of
        temporaries, which has gaps.
      collectives: (kind, axes, count, bytes) of each kind over each set of axes.
      sources: (kind, axes, source line, bytes) of the same.
      modelled: the program's time and what of its collectives runs beside other work
        (program.py: Modelled.summary).
    """

    arguments: int
    temporaries: int
    peak: int
    flops: float
    seconds: float
    collectives: tuple[tuple[str, tuple[str, ...], int, int], ...]
    sources: tuple[tuple[str, tuple[str, ...], str, int], ...] = ()
    modelled: dict[str, Any] | None = None

    @property
    def reserved(self) -> int:
        return self.arguments + self.temporaries

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"reserved": self.reserved}

    def bytes_by_axes(self) -> dict[tuple[str, ...], int]:
        totals: dict[tuple[str, ...], int] = {}
        for _, axes, _, count in self.collectives:
            totals[axes] = totals.get(axes, 0) + count
        return totals

    def table(self, plan: Plan) -> str:
        """Predicted against compiled, side by side."""
        memory, flops = plan.memory, plan.flops
        rows = [
            ("compiled", "predicted", "compiled", "ratio"),
            _row("  peak", memory.peak, self.peak),
            _row("  arguments", memory.arguments, self.arguments),
            _row("  reserved", memory.peak, self.reserved),
            (
                "  FLOPs",
                f"{flops.executed:.4g}",
                f"{self.flops:.4g}",
                f"{flops.executed / self.flops:.3f}",
            ),
        ]
        predicted = by_axes(plan.transfers)
        compiled = {
            axes: count
            for axes, count in self.bytes_by_axes().items()
            if axes in predicted or count >= SMALL
        }
        for axes in dict.fromkeys([*predicted, *compiled]):
            both = predicted.get(axes, 0), compiled.get(axes, 0)
            if max(both) >= SMALL:
                rows.append(_row(f"  over {','.join(axes)}", *both))
        text = align(rows, right=(1, 2, 3))
        lines = [f"  compiled in {self.seconds:.0f} s", *self._unexpected(plan)]
        return "\n".join([text, *self._time(plan), *lines])

    def _time(self, plan: Plan) -> list[str]:
        found = self.modelled
        if found is None:
            return ["  modelled step: not known of a program over several slices"]
        seconds, device = found["seconds"], plan.target.device
        bound = plan.flops.model / device.flops / seconds
        parts = sorted(found["parts"].items(), key=lambda part: -part[1])
        words = [
            f"{1000 * s:.3g} ms {part}" for part, s in parts if s >= 0.005 * seconds
        ]
        return [
            f"  modelled step {1000 * seconds:.3g} ms: {'; '.join(words)}",
            f"  MFU at most {bound:.0%} by it. It ranks programs; it predicts no clock",
            f"  asynchronous {found['asynchronous']} of {found['collectives']} "
            f"collectives, hiding {1000 * found['hidden']:.3g} ms",
        ]

    def _unexpected(self, plan: Plan) -> list[str]:
        expected = {(t.kind, frozenset(t.axes)) for t in plan.transfers}
        found = [
            (
                count,
                f"  not in the plan: {kind} over {','.join(axes)}, "
                f"{human_bytes(count)}, {source}",
            )
            for kind, axes, source, count in self.sources
            if (kind, frozenset(axes)) not in expected and count >= SMALL
        ]
        return [line for _, line in sorted(found, reverse=True)]


class Refused(ValueError):
    """The compiler would not make a program of the step, and said why."""


# Scalars and vectors of norms also travel; below this they are not compared.
SMALL = 2**20


def _row(name: str, predicted: int, compiled: int) -> tuple[str, ...]:
    ratio = f"{predicted / compiled:.3f}" if compiled else "-"
    return name, human_bytes(predicted), human_bytes(compiled), ratio


def compile_step(plan: Plan, keep: Path | None = None) -> Compiled:
    """Compiles the step of a plan for its target.

    Args:
      keep: a file for the text of the optimized program.
    """
    topology = plan.target.topology
    if plan.target.num_slices > 1:
        # The compiler makes a program of one slice, and what crosses the network is no
        # collective of it: the audit would miss that.
        raise ValueError(
            f"--compile for {plan.target.name}: a program over several slices cannot "
            f"be compared yet. Compile one slice of it, --target {topology}, or leave "
            "out --compile."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--compile for {topology}: libtpu, the compiler for TPUs, is not "
            "installed. Install it with pip install 'meshloom[tpu]', best in an "
            "environment of its own, and run the same command there."
        )
    with tempfile.TemporaryDirectory(prefix="meshloom-compile-") as folder:
        job = Path(folder) / "job.pickle"
        facts = {
            "config": plan.config,
            "mesh": plan.case.spec,
            "topology": topology,
            "wrap": plan.target.wrap,
        }
        job.write_bytes(pickle.dumps(facts))
        dump = Path(folder) / "dump"
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
        # libtpu looks for the TPU machine it runs on; nothing here needs one.
        quiet = {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": "",
        }
        done = subprocess.run(
            [sys.executable, "-m", MODULE, str(job), str(dump)],
            env={**quiet, **os.environ, "XLA_FLAGS": flags.strip()},
            capture_output=True,
            text=True,
        )
        result = Path(folder) / "job.json"
        if done.returncode or not result.exists():
            raise Refused(
                f"--compile for {topology}: the compiler refused the step: "
                f"{_reason(done.stderr)}"
            )
        if keep is not None:
            shutil.copy(Path(folder) / "job.hlo", keep)
        found = json.loads(result.read_text())
        found["modelled"] = _modelled(plan, (Path(folder) / "job.hlo").read_text())
    for name in ("collectives", "sources"):
        found[name] = tuple((a, tuple(b), c, d) for a, b, c, d in found[name])
    return Compiled(**found)


def _modelled(plan: Plan, text: str) -> dict[str, Any] | None:
    if plan.target.device.torus and plan.target.num_slices > 1:
        # The program is that of one slice, and what crosses the network is no
        # collective of it.
        return None
    sizes, dcn = plan.case.sizes, plan.case.spec.dcn
    return model_program(text, plan.target, sizes, dcn=dcn).summary()


def _reason(errors: str) -> str:
    """The line that says why, of all that a failed process wrote."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Used " in line]
    return (telling or lines or ["it said nothing"])[-1][:500]
