"""Real train steps, compiled for a target that is not here, beside their forecasts.

Each is compiled in a process of its own: a compiler makes every start of jax slower,
and one that fails must not take the forecast with it. The program's text is read from
the compiler's dump, since jax cannot read every program of a newer libtpu.
"""

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....sharding.text import align, human_bytes, seconds_text
from ..predict import Forecast
from ..traffic import by_axes, sum_by
from .compilers import find_compiler
from .program import model_program

MODULE = "meshloom.trainer.plan.compile.worker"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled step of one device.

    Attributes:
      peak: the most bytes alive at once; `reserved` is arguments and the heap of
        temporaries, which has gaps.
      collectives: (kind, axes, count, bytes) of each kind over each set of axes.
      sources: (kind, axes, source line, bytes) of the same.
      modelled: the program's time and how much of its collectives overlaps
        (program.py: Modelled.summary).
      fused: whether attention is one kernel in it; None if unknown.
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

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Compiled":
        """Returns what `dataclasses.asdict` and JSON made of one."""
        tuples: dict[str, Any] = {
            name: tuple((a, tuple(axes), b, c) for a, axes, b, c in document[name])
            for name in ("collectives", "sources")
        }
        return cls(**document | tuples)

    @property
    def reserved(self) -> int:
        return self.arguments + self.temporaries

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"reserved": self.reserved}

    def bytes_by_axes(self) -> dict[tuple[str, ...], int]:
        return sum_by((axes, count) for _, axes, _, count in self.collectives)

    def table(self, forecast: Forecast) -> str:
        """Returns predicted and compiled, side by side."""
        memory, flops = forecast.memory, forecast.flops
        rows = [
            ("compiled", "predicted", "compiled", "ratio"),
            _row("  peak", memory.peak, self.peak),
            _row("  arguments", memory.arguments, self.arguments),
            _row("  reserved", memory.peak, self.reserved),
            _row("  FLOPs", flops.executed, self.flops, "{:.4g}".format),
        ]
        predicted, compiled = by_axes(forecast.transfers), self.bytes_by_axes()
        for axes in dict.fromkeys([*predicted, *compiled]):
            both = predicted.get(axes, 0), compiled.get(axes, 0)
            if max(both) >= SMALL:
                rows.append(_row(f"  over {','.join(axes)}", *both))
        text = align(rows, right=(1, 2, 3))
        lines = [f"  compiled in {self.seconds:.0f} s", *self._unexpected(forecast)]
        if self.fused is not None and self.fused != forecast.case.costs.fused:
            words = ("stores its scores", "is one kernel")
            lines.append(
                f"  not as forecast: attention {words[self.fused]} in this program and "
                f"{words[not self.fused]} in the forecast"
            )
        return "\n".join([text, *self._time(forecast), *lines])

    def _time(self, forecast: Forecast) -> list[str]:
        found = self.modelled
        if found is None:
            return ["  modelled step: not known of a program over several slices"]
        seconds, device = found["seconds"], forecast.target.device
        bound = forecast.flops.model / device.flops / seconds
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

    def _unexpected(self, forecast: Forecast) -> list[str]:
        expected = {(t.kind, frozenset(t.axes)) for t in forecast.transfers}
        found = [
            (count, f"{kind} over {','.join(axes)}, {human_bytes(count)}, {source}")
            for kind, axes, source, count in self.sources
            if (kind, frozenset(axes)) not in expected and count >= SMALL
        ]
        return [f"  not in the forecast: {x}" for _, x in sorted(found, reverse=True)]


class Refused(ValueError):
    """The compiler refused to compile the step; the message says why."""


# Scalars and vectors of norms are sent too; below this they are not compared.
SMALL = 2**20


def _row(
    name: str,
    predicted: float,
    compiled: float,
    show: Callable[[float], str] = human_bytes,
) -> tuple[str, ...]:
    return name, show(predicted), show(compiled), _ratio(predicted, compiled)


def _ratio(predicted: float, compiled: float) -> str:
    return f"{predicted / compiled:.3f}" if compiled else "-"


def compile_step(forecast: Forecast, keep: Path | None = None) -> Compiled:
    """Compiles the step of a forecast for its target.

    Args:
      keep: a file for the text of the optimized program.
    """
    target = forecast.target
    crossed = [axis for axis, n in (forecast.case.spec.dcn or {}).items() if n > 1]
    if len(crossed) > 1:
        raise ValueError(
            f"--compile for {target.name}: the axes {', '.join(crossed)} cross slices, "
            "and the program does not say which of them a transfer is along. Let one "
            "axis cross, or leave out --compile."
        )
    if crossed and not target.device.torus:
        raise ValueError(
            f"--compile for {target.name}: mesh {forecast.case.spec} has a dcn part, "
            "and the compiler for GPUs has no slices. Leave out the part after /: "
            "neighbours on the mesh share a node anyway."
        )
    compiler = find_compiler(target)
    with tempfile.TemporaryDirectory(prefix="meshloom-compile-") as folder:
        job, dump = Path(folder) / "job.pickle", Path(folder) / "dump"
        facts = {"config": forecast.config, "topology": compiler.topology}
        job.write_bytes(pickle.dumps(facts))
        # XLA takes the last of equal flags, so the user's come after ours.
        flags = [*compiler.flags, os.environ.get("XLA_FLAGS", "")]
        flags += [f"--xla_dump_to={dump}"]
        done = subprocess.run(
            [sys.executable, "-m", MODULE, str(job), str(dump)],
            env=compiler.environment | {**os.environ, "XLA_FLAGS": " ".join(flags)},
            capture_output=True,
            text=True,
        )
        result, program = job.with_suffix(".json"), job.with_suffix(".hlo")
        if done.returncode or not result.exists():
            raise Refused(
                f"--compile for {target.name}: the compiler refused the step: "
                f"{reason(done.stderr)}"
            )
        if keep is not None:
            shutil.copy(program, keep)
        found = json.loads(result.read_text())
        found["modelled"] = _modelled(forecast, program.read_text())
    return Compiled.from_json(found)


def _modelled(forecast: Forecast, text: str) -> dict[str, Any] | None:
    if forecast.target.device.torus and forecast.target.num_slices > 1:
        # The program is that of one slice: transfers over the network are not among
        # its collectives.
        return None
    sizes, dcn = forecast.case.sizes, forecast.case.spec.dcn
    return model_program(text, forecast.target, sizes, dcn=dcn).summary()


def reason(errors: str) -> str:
    """Returns the line of a failed process that says why, and a remedy."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Used " in line]
    line = (telling or lines or ["it wrote nothing"])[-1][:500]
    found = [remedy for words, remedy in REMEDIES.items() if words in errors]
    return " ".join([line, *found])


REMEDIES = {
    "cuDNN not found": "Install it with pip install nvidia-cudnn-cu12, or compile "
    "attention without its kernel: --set model.attention='\"xla\"'.",
    # jax asserts that arrays are not sharded manually, as all are in a pipeline.
    "in _custom_partitioning_partition": "jax cannot shard cuDNN's attention inside a "
    "pipeline. Compile it without: --set model.attention='\"xla\"'.",
}


@dataclasses.dataclass(frozen=True)
class Finalist:
    """A forecast and its program; None if the compiler refused, and `refused` why."""

    forecast: Forecast
    compiled: Compiled | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        peak = self.compiled.peak if self.compiled else None
        return peak is not None and peak <= self.forecast.target.device.usable

    @property
    def seconds(self) -> float | None:
        """The modelled time of the compiled program; None if it has none."""
        modelled = self.compiled and self.compiled.modelled
        return modelled["seconds"] if modelled else None


def compile_finalist(forecast: Forecast) -> Finalist:
    """Compiles a forecast's step; one that the compiler refuses is a finalist too."""
    try:
        return Finalist(forecast, compile_step(forecast))
    except Refused as error:
        return Finalist(forecast, None, str(error))


def table(finalists: Sequence[Finalist]) -> str:
    """Compares predicted with compiled, and says whether the order holds."""
    is_timed = any(f.seconds is not None for f in finalists)
    head = ["compiled", "peak", "predicted", "ratio", "FLOPs", "traffic", "fits"]
    rows = [[*head, "step", "predicted"] if is_timed else head]
    for number, finalist in enumerate(finalists, 1):
        row = [f"  {number}", *_cells(finalist)]
        if is_timed:
            step = seconds_text(finalist.forecast.roofline.step)
            seconds = finalist.seconds
            row += ["-" if seconds is None else seconds_text(seconds), step]
        rows.append(row)
    lines = [align(rows, right=range(1, len(rows[0])))]
    lines += [f"  {n}: {f.refused}" for n, f in enumerate(finalists, 1) if f.refused]
    if is_timed:
        lines.append(f"  {order(finalists)}")
    return "\n".join(lines)


def _cells(finalist: Finalist) -> list[str]:
    forecast, compiled = finalist.forecast, finalist.compiled
    peak = forecast.memory.peak
    if compiled is None:
        return ["-", human_bytes(peak), "-", "-", "-", "no"]
    expected = sum(by_axes(forecast.transfers).values())
    return [
        human_bytes(compiled.peak),
        human_bytes(peak),
        _ratio(peak, compiled.peak),
        _ratio(forecast.flops.executed, compiled.flops),
        _ratio(expected, sum(compiled.bytes_by_axes().values())),
        "yes" if finalist.fits else "no",
    ]


def order(finalists: Sequence[Finalist]) -> str:
    """Says whether the compiled programs rank as their forecasts do."""
    timed = {n: f.seconds for n, f in enumerate(finalists, 1) if f.seconds is not None}
    by = sorted(timed, key=lambda n: timed[n])
    if by == list(timed):
        return "The order holds."
    return f"It does not hold: by the compiled step it is {', '.join(map(str, by))}."
