"""The real train step, compiled for a target that is not here, beside its plan.

It runs in a process of its own: a compiler makes every start of jax slower, and one
that fails must not take the plan with it. The program's text is read from what the
compiler writes to a folder, since jax cannot read every program of a newer libtpu.
"""

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ....sharding.text import align, human_bytes
from ..predict import Plan
from ..traffic import by_axes
from .compilers import find_compiler
from .program import model_program

MODULE = "meshloom.trainer.plan.compile.worker"


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
      fused: whether attention is one kernel in it; None where nobody looked.
    """

    arguments: int
    temporaries: int
    peak: int
    flops: float
    seconds: float
    collectives: tuple[tuple[str, tuple[str, ...], int, int], ...]
    sources: tuple[tuple[str, tuple[str, ...], str, int], ...] = ()
    modelled: dict[str, Any] | None = None
    fused: bool | None = None

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
        if self.fused is not None and self.fused != plan.case.costs.fused:
            words = ("stores its scores", "is one kernel")
            lines.append(
                f"  not as planned: attention {words[self.fused]} in this program, and "
                f"{words[not self.fused]} in the plan"
            )
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
    target = plan.target
    crossed = [axis for axis, n in (plan.case.spec.dcn or {}).items() if n > 1]
    if len(crossed) > 1:
        raise ValueError(
            f"--compile for {target.name}: the axes {', '.join(crossed)} cross slices, "
            "and the program does not say which of them a transfer is along. Let one "
            "axis cross, or leave out --compile."
        )
    if crossed and not target.device.torus:
        raise ValueError(
            f"--compile for {target.name}: mesh {plan.case.spec} has a dcn part, and "
            "the compiler for GPUs knows no slices. Leave the part after / out: "
            "neighbours on the mesh share a node all the same."
        )
    compiler = find_compiler(target)
    with tempfile.TemporaryDirectory(prefix="meshloom-compile-") as folder:
        job = Path(folder) / "job.pickle"
        facts = {
            "config": plan.config,
            "mesh": plan.case.spec,
            "topology": compiler.topology,
        }
        job.write_bytes(pickle.dumps(facts))
        dump = Path(folder) / "dump"
        # XLA takes the last of equal flags, so the user's come after ours.
        flags = [*compiler.flags, os.environ.get("XLA_FLAGS", "")]
        flags += [f"--xla_dump_to={dump}"]
        done = subprocess.run(
            [sys.executable, "-m", MODULE, str(job), str(dump)],
            env={
                **compiler.environment,
                **os.environ,
                "XLA_FLAGS": " ".join(flags),
            },
            capture_output=True,
            text=True,
        )
        result = Path(folder) / "job.json"
        if done.returncode or not result.exists():
            raise Refused(
                f"--compile for {target.name}: the compiler refused the step: "
                f"{reason(done.stderr)}"
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


def reason(errors: str) -> str:
    """The line that says why, of all that a failed process wrote, and a remedy."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Used " in line]
    line = (telling or lines or ["it said nothing"])[-1][:500]
    found = [remedy for words, remedy in REMEDIES.items() if words in errors]
    return " ".join([line, *found])


REMEDIES = {
    "cuDNN not found": "Install it with pip install nvidia-cudnn-cu12, or compile "
    "attention without its kernel: --set model.attention='\"xla\"'.",
    # jax asserts that an array is not cut by hand, as all are in a pipeline.
    "in _custom_partitioning_partition": "jax cannot cut cuDNN's attention inside a "
    "pipeline. Compile it without: --set model.attention='\"xla\"'.",
}
