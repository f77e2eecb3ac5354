"""The compiler for TPUs agrees: memory does not grow with the number of microbatches.

The benchmark compiles for devices that need not be there, in processes of its own:
beside a CPU jax, libtpu makes every start slower. Without libtpu that is skipped.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
from paths import ROOT

SCRIPT = ROOT / "benchmarks" / "pipeline.py"
FEW, MANY = 8, 32
SIZES = "--layers 8 --width 128 --length 256 --vocab 1024 --rows 8"
# Left alone, the compiler keeps all of so small a model in the chip's fast memory, and
# counts as temporaries only what is outside it.
OUTSIDE = "--compiler xla_vf_vmem_memory_space_assignment=false"
TIME_LIMIT = 540

pytestmark = [pytest.mark.timeout(600), pytest.mark.compiles_anew]
has_libtpu = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(
    not has_libtpu, reason="libtpu, the compiler for TPUs, is not installed"
)


def start(topology: str, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--topology", topology, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """(status, what it said on stderr)"""
    try:
        _, errors = process.communicate(timeout=TIME_LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, errors


@pytest.fixture(
    scope="module",
    params=["v5e:4x4", pytest.param("v5p:4x4x4", marks=pytest.mark.slow)],
)
def cases(request, tmp_path_factory) -> dict[str, dict]:
    """Figures of the schedules, compiled in two processes at once."""
    folder = tmp_path_factory.mktemp("tpu")
    words = [*SIZES.split(), *OUTSIDE.split(), "--microbatches", str(FEW)]
    running = {}
    try:
        for names in (["interleaved"], ["1f1b", "gpipe"]):
            file = folder / f"{names[0]}.json"
            options = [*words, "--json", str(file), "--cases", *names]
            running[file] = start(request.param, *options)
        for process in running.values():
            status, errors = finish(process)
            assert status == 0, errors
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    found = [json.loads(file.read_text())["cases"] for file in running]
    return {case["case"]: case for part in found for case in part}


def of(case: dict, figure: str) -> list:
    """A figure with few and with many microbatches."""
    return [case[f"microbatches_{num}"][figure] for num in (FEW, MANY)]


@needs_libtpu
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_temporaries_do_not_grow_with_microbatches(cases, name):
    few, many = of(cases[name], "temporaries")
    assert many <= 1.05 * few


@needs_libtpu
def test_temporaries_of_gpipe_grow(cases):
    """So what the other schedules save is among what is counted."""
    few, many = of(cases["gpipe"], "temporaries")
    # Inputs of a stage, [8 rows, 256 positions, width 128] in bfloat16.
    assert many - few > 0.8 * (MANY - FEW) * 8 * 256 * 128 * 2


@needs_libtpu
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe"])
def test_weights_alone_are_gathered(cases, name):
    few, many = (
        {
            tuple(total["axes"]): (total["count"], total["bytes"])
            for total in totals
            if total["kind"] == "all-gather"
        }
        for totals in of(cases[name], "collectives")
    )
    # What is gathered of microbatches is gathered more often with more of them.
    assert few == many
    assert few.keys() == {("fsdp",), ("pipe",)}


@needs_libtpu
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe"])
def test_products_grow_as_the_simulator_says(cases, name):
    executed, simulated = (
        many / few
        for few, many in (of(cases[name], x) for x in ("flops", "simulated_flops"))
    )
    assert executed == pytest.approx(simulated, rel=0.01)


@pytest.mark.skipif(has_libtpu, reason="libtpu is installed")
def test_without_libtpu_one_line_says_so():
    status, errors = finish(start("v5e:4x4"))
    assert status == 2
    assert errors.count("\n") == 1
    assert "--topology v5e:4x4: libtpu, the compiler for TPUs, is not inst" in errors
