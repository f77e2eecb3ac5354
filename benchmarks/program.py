"""Computes FLOPs, traffic and modelled time of a compiled program from its HLO text.

    python benchmarks/program.py FILE.hlo --target v5p-128 --mesh fsdp=16,tensor=4

Reads any XLA program for TPUs or GPUs, ours (meshloom plan --compile --keep-hlo) or
another. The mesh gives the axes in the order of the program's device ids, slowest
network first; only the sizes matter, the names are up to you. Nothing is compiled.

The time ranks programs on the same target; it does not predict a measurement. See
trainer/plan/compile/program.py for what is modelled and what is not.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from meshloom.sharding.text import align, human_bytes
from meshloom.trainer.plan.compile.program import Modelled, model_program
from meshloom.trainer.program.hardware import parse_target


def mesh(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Parses the sizes of the axes, and the factors that cross slices."""
    sizes, slices = {}, {}
    for word in text.split(","):
        name, _, size = word.partition("=")
        size, _, far = size.partition("/")
        if not name or not size.isdigit() or not (far or "1").isdigit():
            raise argparse.ArgumentTypeError(
                f"{word!r} is not an axis; expected fsdp=16,tensor=4, or data=2/2,... "
                "for an axis that crosses 2 slices"
            )
        sizes[name], slices[name] = int(size), int(far or 1)
    return sizes, slices


def table(found: Modelled, peak: float, model_flops: float | None, top: int) -> str:
    """Formats the parts of the step, its collectives and its slowest operations."""
    done, total, hidden = found.asynchronous()
    rows = [
        ("executed", f"{found.flops:.4g} FLOPs", ""),
        ("step, modelled", _ms(found.seconds), ""),
        *(
            (f"  {part}", _ms(seconds), f"{seconds / found.seconds:.1%}")
            for part, seconds in sorted(found.parts.items(), key=lambda p: -p[1])
            if seconds >= SMALL * found.seconds
        ),
        (
            "collectives",
            _ms(found.network),
            f"{done} of {total} asynchronous, hiding {_ms(hidden)}",
        ),
    ]
    if model_flops:
        bound = model_flops / peak / found.seconds
        rows.append(
            ("MFU bound", f"{bound:.3f}", "time of the model FLOPs at peak / step")
        )
    for name in found.unknown_kernels:
        rows.append(("not counted", "", f"the FLOPs of kernel {name}"))
    blocks = [align(rows, right=(1,)), _exchanges(found), _operations(found, top)]
    return "\n\n".join(blocks)


# Omits parts of a step below this share.
SMALL = 0.0005


def _exchanges(found: Modelled) -> str:
    totals: dict[tuple[str, str, bool], list[float]] = {}
    for one in found.exchanges:
        key = one.kind, ",".join(one.axes), one.asynchronous
        sums = totals.setdefault(key, [0, 0, 0, 0])
        for i, count in enumerate((one.count, one.bytes, one.seconds, one.exposed)):
            sums[i] += count
    rows = [("collective", "axes", "", "count", "bytes", "busy", "exposed")]
    for (kind, axes, is_async), (count, size, busy, exposed) in sorted(
        totals.items(), key=lambda row: -row[1][2]
    ):
        how = "asynchronous" if is_async else "synchronous"
        numbers = f"{count:.0f}", human_bytes(round(size)), _ms(busy), _ms(exposed)
        rows.append((kind, axes, how, *numbers))
    return align(rows, right=(3, 4, 5, 6))


def _operations(found: Modelled, top: int) -> str:
    rows = [("operation", "bound by", "runs", "time", "FLOPs", "bytes", "source")]
    for one in found.operations[:top]:
        rows.append(
            (
                one.name,
                one.part,
                str(one.count),
                _ms(one.seconds),
                f"{one.flops:.3g}",
                human_bytes(one.bytes),
                "/".join(one.source.rsplit("/", 3)[-3:]),
            )
        )
    return align(rows, right=(2, 3, 4, 5))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="optimized, scheduled HLO text")
    parser.add_argument("--target", required=True, help="such as v5p-128 or h100:8x8")
    parser.add_argument("--mesh", required=True, type=mesh, help="fsdp=16,tensor=4")
    parser.add_argument(
        "--model-flops",
        type=float,
        help="model FLOPs per device and step, without remat; for the MFU bound",
    )
    parser.add_argument("--top", type=int, default=10, help="operations to list")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    target, (sizes, slices) = parse_target(args.target), args.mesh
    found = model_program(args.file.read_text(), target, sizes, dcn=slices)
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        print(table(found, target.device.flops, args.model_flops, args.top))


if __name__ == "__main__":
    main()
