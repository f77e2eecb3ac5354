"""What a compiler is told of a target, and what is said where it is not installed."""

import importlib.util
from pathlib import Path

import pytest
from tiny_plans import config

from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.compile import compiled, compilers
from meshloom.trainer.program.hardware import DEVICES, parse_target


@pytest.fixture
def installed(monkeypatch):
    """All compilers, as far as these functions look."""
    monkeypatch.setattr(compilers, "_need", lambda *_: None)


def toolkit(folder: Path) -> Path:
    for part in ("bin/ptxas", "nvvm/libdevice"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    return folder


def test_a_slice_is_known_by_its_shape(installed):
    found = compilers.find_compiler(parse_target("v5p-128"))
    rings = {"wrap": (True, True, True)}
    assert found.topology == {
        "platform": "tpu",
        "topology_name": "v5p:4x4x4",
        **rings,
    }
    v4 = compilers.find_compiler(parse_target("v4-32")).topology
    assert v4["chip_config_name"] == "megacore"


def test_nodes_of_gpus_and_what_a_gpu_is(installed, monkeypatch, tmp_path):
    monkeypatch.setattr(compilers, "_toolkits", lambda: [toolkit(tmp_path)])
    found = compilers.find_compiler(parse_target("h100:4x8"))
    assert found.topology["topology"] == "1x4x8"
    assert f"--xla_gpu_cuda_data_dir={tmp_path}" in found.flags
    config = found.topology["target_config"]
    # 132 multiprocessors of 4096 FLOPs a cycle make the 989.5 TFLOP/s of the sheet.
    assert "core_count: 132 " in config and "clock_rate_ghz: 1.83 " in config
    assert f"device_memory_size: {DEVICES['h100'].hbm:.0f} " in config
    assert "cuda_compute_capability { major: 9 }" in config
    older = compilers.find_compiler(parse_target("a100:1x8")).topology["target_config"]
    assert "core_count: 108 " in older and "clock_rate_ghz: 1.411 " in older


def test_the_first_whole_toolkit_is_taken(installed, monkeypatch, tmp_path):
    half = tmp_path / "half"
    (half / "bin/ptxas").mkdir(parents=True)
    whole = toolkit(tmp_path / "whole")
    monkeypatch.setattr(compilers, "_toolkits", lambda: [half, whole])
    flags = compilers.find_compiler(parse_target("a100:1x8")).flags
    assert flags[-1] == f"--xla_gpu_cuda_data_dir={whole}"


def test_without_a_toolkit_one_line_names_the_remedy(installed, monkeypatch, tmp_path):
    monkeypatch.setattr(compilers, "_toolkits", lambda: [tmp_path])
    with pytest.raises(ValueError, match="pip install nvidia-cuda-nvcc-cu12") as error:
        compilers.find_compiler(parse_target("h100:1x8"))
    assert str(tmp_path) in str(error.value)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"libtpu, .* pip install 'meshloom\[tpu\]'"):
        compilers.find_compiler(parse_target("v5e-16"))
    with pytest.raises(ValueError, match=r"'meshloom\[cuda-compile\]'"):
        compilers.find_compiler(parse_target("a100:1x8"))


def test_a_device_of_ones_own_has_no_compiler():
    numbers = "flops=4e14,hbm=64e9,hbm_bandwidth=2e12,link=2e11,network=2.5e10"
    with pytest.raises(ValueError, match="a device of your own has no compiler"):
        compilers.find_compiler(parse_target(f"own:2x4,{numbers}"))


def test_a_missing_cudnn_has_a_remedy():
    errors = "  File x\nRuntimeError: cuDNN not found.\n----\nFor simplicity, JAX has"
    reason = compiled.reason(errors)
    assert reason.startswith("RuntimeError: cuDNN not found. Install it with pip")
    assert compiled.reason("a\nValueError: b") == "ValueError: b"


def test_attention_that_a_pipeline_cannot_cut_has_a_remedy():
    errors = "  line 163, in _custom_partitioning_partition\nAssertionError: \n"
    assert compiled.reason(errors).startswith("AssertionError: jax cannot shard cuDNN'")


@pytest.mark.parametrize("fused", [True, False, None])
def test_other_attention_than_planned_is_said(fused):
    found = forecast(config(), "h100:1x8", mesh="fsdp=8")
    numbers = {"arguments": 1, "temporaries": 1, "peak": 1, "flops": 1.0}
    made = compiled.Compiled(**numbers, seconds=1.0, collectives=(), fused=fused)
    line = "not as forecast: attention stores its scores in this program and is one ker"
    assert (line in made.table(found)) == (fused is False)
