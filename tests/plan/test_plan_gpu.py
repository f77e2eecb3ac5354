"""The closed form against XLA for GPUs, where that is installed.

docs/plan.md has the table of many more (benchmarks/plan.py).
"""

import importlib.util

import pytest
from tiny_plans import compiled_config

from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.compile.compiled import SMALL, compile_step
from meshloom.trainer.plan.traffic import by_axes

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda12_plugin") is None,
        reason="jax-cuda12-plugin, the compiler for GPUs, is not installed",
    ),
]
needs_cudnn = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None
    or importlib.util.find_spec("nvidia.cudnn") is None,
    reason="cuDNN, whose attention is compiled here, is not installed",
)


@pytest.mark.parametrize(
    ("target", "mesh", "remat", "num_microbatches", "attention"),
    [
        pytest.param("h100:2x8", "fsdp=16", "full", None, "cudnn", marks=needs_cudnn),
        pytest.param(
            "a100:2x8",
            "fsdp=4,tensor=4",
            "save-named",
            None,
            "cudnn",
            marks=needs_cudnn,
        ),
        ("h100:2x8", "fsdp=16", "save-dots", None, "xla"),
        ("h100:2x8", "pipe=4,fsdp=4", "full", 4, "xla"),
    ],
)
def test_predicted_is_compiled(
    target, mesh, remat, num_microbatches, attention, tmp_path
):
    c = compiled_config(remat, num_microbatches, attention=attention)
    found = forecast(c, target, mesh=mesh, batch=64)
    compiled = compile_step(found, keep=tmp_path / "step.hlo")
    assert found.memory.peak == pytest.approx(compiled.peak, rel=0.1)
    assert found.memory.arguments == pytest.approx(compiled.arguments, rel=0.01)
    assert found.flops.executed == pytest.approx(compiled.flops, rel=0.001)
    moved, predicted = compiled.bytes_by_axes(), by_axes(found.transfers)
    for axes in {*moved, *predicted}:
        if max(moved.get(axes, 0), predicted.get(axes, 0)) > SMALL:
            assert predicted[axes] == pytest.approx(moved[axes], rel=0.05), axes
    text = (tmp_path / "step.hlo").read_text()
    assert ("__cudnn$fmhaSoftmaxBackward" in text) == (attention == "cudnn")
