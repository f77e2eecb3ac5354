"""Compares pipeline schedules: bubble, FLOPs, temporary memory and step time.

    python benchmarks/pipeline.py [--cases gpipe 1f1b 1f1b:none] [--mesh pipe=4,fsdp=2]
    python benchmarks/pipeline.py --topology v5e:4x4 [--cases 1f1b interleaved]

A case is a schedule, followed by the remat policy and by when weights are gathered if
they are not the default, separated by colons. All cases, and the same model without a
pipeline whose batch is sharded over the stages' devices instead, alternate in one run.
With --topology, programs are compiled for TPUs that need not be present, and nothing is
run; that needs libtpu.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from pipeline_cases import Bench, Case, Program

from meshloom.sharding import MeshSpec
from meshloom.sharding.text import align, human_bytes

# The factor by which microbatches are increased to measure growth.
MORE = 4
SCHEDULES = ["gpipe", "1f1b", "interleaved"]
CASES = [*SCHEDULES, "1f1b:none", "1f1b:full", "1f1b:microbatch"]
ON_CPU = {
    "mesh": "pipe=4,fsdp=2",
    "layers": 16,
    "width": 192,
    "length": 128,
    "vocab": 512,
    "rows": 2,
}
ON_TPU = {
    "mesh": "pipe=4,fsdp=-1,tensor=2",
    "layers": 16,
    "width": 1024,
    "length": 1024,
    "vocab": 32_000,
    "rows": 2,
}


def compile_case(bench: Bench, case: Case, num: int) -> tuple[dict[str, Any], Program]:
    """Returns the static figures, and the program of `num` microbatches."""
    found = bench.simulate(case, num)
    result: dict[str, Any] = {"case": str(case), "bubble": found.bubble}
    programs = {n: bench.staged(case, n) for n in (num, MORE * num)}
    if bench.mesh.devices.flat[0].platform == "cpu":
        # Never run. Buffers and matmuls are the same, compiled in half the time.
        quick = {"xla_backend_optimization_level": 0} | bench.options
        programs[MORE * num] = dataclasses.replace(programs[MORE * num], options=quick)
    for count, program in programs.items():
        begin = time.perf_counter()
        figures = program.figures()
        print(
            f"{case}, {count} microbatches: {time.perf_counter() - begin:.0f} s",
            file=sys.stderr,
        )
        simulated = {"simulated_flops": bench.simulated_flops(case, count)}
        result[f"microbatches_{count}"] = simulated | figures
    return result, programs[num]


def measure(bench: Bench, programs: dict[str, Program], rounds: int) -> dict[str, Any]:
    """Returns the seconds of each program; programs alternate."""
    inputs = {name: p.inputs(bench.model) for name, p in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, float] = {}
    for i in range(rounds + 1):  # the first is a warm-up
        for name, program in programs.items():
            begin = time.perf_counter()
            sums, grads = jax.block_until_ready(program.compiled(*inputs[name]))
            if i:
                seconds[name].append(time.perf_counter() - begin)
            losses[name] = float(sums["loss"])
            del sums, grads
    (first, *others) = losses.values()
    assert all(math.isclose(x, first, rel_tol=1e-4) for x in others), losses
    return seconds


def add_times(result: dict[str, Any], seconds: dict[str, list[float]], num: int):
    """Adds medians, and ratios to the unpipelined model in the same round."""
    plain = result["unpipelined"]
    plain["step_s"] = statistics.median(seconds["unpipelined"])
    for case in result["cases"]:
        times = seconds[case["case"]]
        ratios = [a / b for a, b in zip(times, seconds["unpipelined"], strict=True)]
        flops = case[f"microbatches_{num}"]["flops"] / plain["flops"]
        case |= {
            "step_s": statistics.median(times),
            "step_s_range": [min(times), max(times)],
            "time_against_unpipelined": statistics.median(ratios),
            "flops_against_unpipelined": flops,
            "flop_rate_against_unpipelined": flops / statistics.median(ratios),
        }


def table(result: dict[str, Any]) -> str:
    """Formats the figures of all cases."""
    num = result["microbatches"]
    few, many = f"microbatches_{num}", f"microbatches_{MORE * num}"
    has_times = "unpipelined" in result
    head = ["", "bubble", "GFLOP", "of simulated", "temporaries", f"at {MORE * num}"]
    head += ["growth"]
    if has_times:
        head += ["step", "x unpipelined", "FLOPs x", "FLOP/s x"]
    rows = [head]
    for case in result["cases"]:
        a, b = case[few], case[many]
        row = [
            case["case"],
            f"{100 * case['bubble']:.1f} %",
            f"{a['flops'] / 1e9:.4g}",
            f"{a['flops'] / a['simulated_flops']:.3f}",
            human_bytes(a["temporaries"]),
            human_bytes(b["temporaries"]),
            f"{b['temporaries'] / a['temporaries']:.3f}",
        ]
        if has_times:
            row += [
                f"{case['step_s']:.3f} s",
                f"{case['time_against_unpipelined']:.2f}",
                f"{case['flops_against_unpipelined']:.2f}",
                f"{case['flop_rate_against_unpipelined']:.2f}",
            ]
        rows.append(row)
    if has_times:
        plain = result["unpipelined"]
        row = ["unpipelined", "", f"{plain['flops'] / 1e9:.4g}", ""]
        row += [human_bytes(plain["temporaries"]), "", ""]
        rows.append([*row, f"{plain['step_s']:.3f} s", "1", "1", "1"])
    return align(rows, right=range(1, len(head)))


def traffic(result: dict[str, Any]) -> str:
    """Formats the collectives per device, with few and with many microbatches."""
    num = result["microbatches"]
    counts = num, MORE * num
    rows = [["", "collective", "over", *(f"at {n}" for n in counts)]]
    for case in result["cases"]:
        cells: dict[tuple[str, str], list[str]] = {}
        for i, count in enumerate(counts):
            for total in case[f"microbatches_{count}"]["collectives"]:
                key = total["kind"], ",".join(total["axes"])
                text = f"{total['count']} x, {human_bytes(total['bytes'])}"
                cells.setdefault(key, ["-", "-"])[i] = text
        rows += [[case["case"], *key, *found] for key, found in cells.items()]
    return align(rows, right=(3, 4))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles all cases and, without --topology, times them."""
    cases = [Case.parse(text) for text in args.cases]
    jax.config.update("jax_platforms", "cpu")
    # Pipelines loaded from the cache hang on CPU devices: docs/pipeline.md.
    jax.config.update("jax_enable_compilation_cache", False)
    if args.topology:
        devices = tpu_devices(args.topology)
    else:
        num_devices = math.prod(MeshSpec.parse(args.mesh).abstract().axis_sizes)
        # Enough threads for all blocking collectives: docs/pipeline.md.
        os.environ["NPROC"] = str(max(4 * num_devices, os.cpu_count() or 1))
        jax.config.update("jax_num_cpu_devices", num_devices)
        devices = jax.devices()
    bench = Bench.of(args, devices, "bfloat16" if args.topology else "float32")
    num = args.microbatches
    result: dict[str, Any] = {
        "devices": f"{len(devices)} {devices[0].device_kind}",
        "mesh": args.mesh,
        "microbatches": num,
        "rows": args.rows,
        "model": {k: getattr(args, k) for k in ("layers", "width", "length", "vocab")},
        "cases": [],
    }
    programs = {}
    for case in cases:
        figures, programs[str(case)] = compile_case(bench, case, num)
        result["cases"].append(figures)
    if not args.topology:
        programs["unpipelined"] = bench.unpipelined(num)
        result["unpipelined"] = programs["unpipelined"].figures()
        add_times(result, measure(bench, programs, args.rounds), num)
    return result


def tpu_devices(name: str) -> list[Any]:
    """Returns the devices of a TPU topology to compile for."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology {name}: libtpu, the TPU compiler, is not installed. Run pip "
            "install libtpu, in a separate environment."
        )
    # libtpu looks for a TPU host and locks it; compiling needs neither.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"--topology {name}: libtpu does not support it: {error}. Example: v5e:4x4."
        ) from error
    return list(found.devices)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--topology", help="compile for a TPU topology, such as v5e:4x4"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        help=f"default {' '.join(CASES)}, with --topology {' '.join(SCHEDULES)}",
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--chunks", type=int, default=2, help="chunks of the interleaved schedule"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compiler", action="append", default=[], help="an XLA option, NAME=VALUE"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    for name, value in ON_CPU.items():
        text = f"default {value}, with --topology {ON_TPU[name]}"
        parser.add_argument(f"--{name}", type=type(value), help=text)
    args = parser.parse_args()
    args.cases = args.cases or (SCHEDULES if args.topology else CASES)
    for name, value in (ON_TPU if args.topology else ON_CPU).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    try:
        result = run(args)
    except ValueError as error:
        print(f"pipeline.py: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if args.json:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"{result['devices']}, mesh {args.mesh}, {args.microbatches} microbatches")
    print(table(result))
    if args.topology:
        print(f"\n{traffic(result)}")


if __name__ == "__main__":
    main()
