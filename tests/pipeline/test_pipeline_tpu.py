"""XLA for TPU agrees: memory does not grow with the number of microbatches.

The benchmark compiles for devices that are not present, in separate processes: with
libtpu, every start of a CPU jax is slower. Without libtpu, these tests are skipped.
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
# By default, the compiler keeps all of so small a model in VMEM and counts only memory
# outside it as temporaries.
OUTSIDE = "--compiler xla_vf_vmem_memory_space_assignment=false"
TIME_LIMIT = 540

pytestmark = [pytest.mark.timeout(600), pytest.mark.compiles_anew]
has_libtpu = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(
    not has_libtpu, reason="libtpu, the TPU compiler, is not installedalled"
)


def start(topology: str, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--topology", topology, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """Returns the exit status and stderr."""
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
    """Returns figures of the schedules, compiled in two concurrent processes."""
    folder = tmp_path_factory.mktemp("tpu")
    arguments = [*SIZES.split(), *OUTSIDE.split(), "--microbatches", str(FEW)]
    running = {}
    try:
        for names in (["interleaved"], ["1f1b", "gpipe"]):
            file = folder / f"{names[0]}.json"
            options = [*arguments, "--json", str(file), "--cases", *names]
            running[file] = start(request.param, *options)
        for process in running.values():
            status, errors = finish(process)
            assert status == 0, errors
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    result = [json.loads(file.read_text())["cases"] for file in running]
    return {case["case"]: case for part in result for case in part}


def of(case: dict, figure: str) -> list:
    """Returns a figure with few and with many microbatches."""
    return [case[f"microbatches_{num}"][figure] for num in (FEW, MANY)]


@needs_libtpu
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_temporaries_do_not_grow_with_microbatches(cases, name):
    few, many = of(cases[name], "temporaries")
    assert many <= 1.05 * few


@needs_libtpu
def test_temporaries_of_gpipe_grow(cases):
    """This shows that the saved inputs are among the memory that is counted."""
    few, many = of(cases["gpipe"], "temporaries")
    # Inputs of a stage, [8 rows, 256 positions, width 128] in bfloat16.
    assert many - few > 0.8 * (MANY - FEW) * 8 * 256 * 128 * 2


@needs_libtpu
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe"])
def test_only_weights_are_gathered(cases, name):
    few, many = (
        {
            tuple(total["axes"]): (total["count"], total["bytes"])
            for total in totals
            if total["kind"] == "all-gather"
        }
        for totals in of(cases[name], "collectives")
    )
    # Gathers of microbatches would grow in number with the microbatches.
    assert few == many
    assert few.keys() == {("fsdp",), ("pipe",)}


@needs_libtpu
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe"])
def test_flops_grow_as_simulated(cases, name):
    executed, simulated = (
        many / few
        for few, many in (of(cases[name], x) for x in ("flops", "simulated_flops"))
    )
    assert executed == pytest.approx(simulated, rel=0.01)


@pytest.mark.skipif(has_libtpu, reason="libtpu is installed")
def test_without_libtpu_there_is_a_one_line_error():
    status, errors = finish(start("v5e:4x4"))
    assert status == 2
    assert errors.count("\n") == 1
    assert "--topology v5e:4x4: libtpu, the TPU compiler, is not installed" in errors
