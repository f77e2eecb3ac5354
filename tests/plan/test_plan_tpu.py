"""The closed form against the compiler for TPUs, where that is installed.

docs/plan.md has the table of many more (benchmarks/plan.py); these are small enough to
compile in a minute, and large enough not to be kept in the chip's fast memory.
"""

import dataclasses
import importlib.util

import pytest
from tiny_plans import compiled_config

from meshloom.sharding.plans import WITH_SEQUENCE
from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.compile.compiled import SMALL, compile_step
from meshloom.trainer.plan.traffic import by_axes

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the compiler for TPUs, is not installed",
    ),
]


@pytest.mark.parametrize(
    ("mesh", "remat", "num_microbatches", "batch"),
    [
        ("fsdp=16", "save-named", None, 64),
        ("fsdp=4,tensor=4", "full", None, 16),
        # Logits wait for the head's gradient, which follows those of all blocks.
        ("fsdp=4,tensor=4", "full", None, 64),
        ("pipe=4,fsdp=4", "full", 4, 64),
    ],
)
def test_predicted_is_compiled(mesh, remat, num_microbatches, batch, tmp_path):
    c = compiled_config(remat=remat, num_microbatches=num_microbatches)
    found = forecast(c, "v5e:4x4", mesh=mesh, batch=batch)
    compiled = compile_step(found, keep=tmp_path / "step.hlo")
    assert found.memory.peak == pytest.approx(compiled.peak, rel=0.1)
    assert found.memory.arguments == pytest.approx(compiled.arguments, rel=0.01)
    assert found.flops.executed == pytest.approx(compiled.flops, rel=0.001)
    moved, predicted = compiled.bytes_by_axes(), by_axes(found.transfers)
    for axes in {*moved, *predicted}:
        if max(moved.get(axes, 0), predicted.get(axes, 0)) > SMALL:
            assert predicted[axes] == pytest.approx(moved[axes], rel=0.05), axes
    assert (tmp_path / "step.hlo").read_text().startswith("HloModule")
    assert "ratio" in compiled.table(found)


def test_a_stream_sharded_by_position_is_gathered_again():
    c = compiled_config(remat="full", num_microbatches=1)
    c = dataclasses.replace(c, plan=WITH_SEQUENCE)
    found = forecast(c, "v5e:4x4", mesh="fsdp=4,tensor=4", batch=64)
    compiled = compile_step(found)
    assert found.memory.peak == pytest.approx(compiled.peak, rel=0.1)
    assert found.flops.executed == pytest.approx(compiled.flops, rel=0.001)
    moved, predicted = compiled.bytes_by_axes(), by_axes(found.transfers)
    assert predicted[("tensor",)] == pytest.approx(moved[("tensor",)], rel=0.05)


def test_what_crosses_slices_is_compiled_too():
    c = compiled_config(remat="full")
    found = forecast(c, "2xv5e:2x2", mesh="data=2/2,fsdp=4", batch=32)
    compiled = compile_step(found)
    assert found.memory.peak == pytest.approx(compiled.peak, rel=0.1)
    assert found.flops.executed == pytest.approx(compiled.flops, rel=0.001)
    moved, predicted = compiled.bytes_by_axes(), by_axes(found.transfers)
    for axes in (("data",), ("fsdp",)):
        assert predicted[axes] == pytest.approx(moved[axes], rel=0.05), axes
