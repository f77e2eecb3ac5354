"""Tests of the peaks of known devices, and of the measured CPU peak."""

import types

import jax
import pytest

from meshloom.trainer.program import peaks
from meshloom.trainer.program.peaks import Peak, peak_flops, total_peak


def device(platform, kind, process_index=0):
    return types.SimpleNamespace(
        platform=platform, device_kind=kind, process_index=process_index
    )


@pytest.mark.parametrize(
    ("platform", "kind", "dtype", "flops", "label"),
    [
        ("tpu", "TPU v3", "bfloat16", 61.5e12, "bf16 peak"),
        ("tpu", "TPU v4", "bfloat16", 275e12, "bf16 peak"),
        ("tpu", "TPU v5 lite", "float32", 197e12, "bf16 peak"),
        ("tpu", "TPU v5p", "bfloat16", 459e12, "bf16 peak"),
        ("tpu", "TPU v6 lite", "bfloat16", 918e12, "bf16 peak"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "bfloat16", 312e12, "bf16 peak"),
        ("gpu", "NVIDIA A100 80GB PCIe", "float32", 156e12, "tf32 peak"),
        ("gpu", "NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12, "bf16 peak"),
        ("gpu", "NVIDIA H100 PCIe", "bfloat16", 756.5e12, "bf16 peak"),
        ("gpu", "NVIDIA H200", "bfloat16", 989.5e12, "bf16 peak"),
        ("gpu", "NVIDIA B200", "bfloat16", 2250e12, "bf16 peak"),
        ("gpu", "NVIDIA L4", "bfloat16", 121e12, "bf16 peak"),
        ("gpu", "Tesla V100-SXM2-16GB", "float32", 15.7e12, "fp32 peak"),
    ],
)
def test_known_devices(platform, kind, dtype, flops, label):
    assert peak_flops(device(platform, kind), dtype) == Peak(flops, label)


@pytest.mark.parametrize(
    ("platform", "kind", "dtype"),
    [
        ("tpu", "TPU v99", "bfloat16"),
        ("tpu", "TPU v4", "float16"),
        ("gpu", "NVIDIA L40S", "bfloat16"),
        ("gpu", "NVIDIA GH200 480GB", "bfloat16"),
        ("gpu", "NVIDIA GB200", "bfloat16"),
        ("gpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("gpu", "Tesla V100-SXM2-16GB", "bfloat16"),
        ("gpu", "NVIDIA H100 80GB HBM3", "float64"),
    ],
)
def test_unknown_devices_have_none(platform, kind, dtype):
    assert peak_flops(device(platform, kind), dtype) is None
    assert total_peak([device(platform, kind)] * 4, dtype) is None


def test_accelerators_add_up_and_mixed_ones_are_unknown():
    four = [device("tpu", "TPU v4", process_index=i) for i in range(4)]
    assert total_peak(four, "bfloat16") == Peak(4 * 275e12, "bf16 peak")
    assert total_peak([*four, device("tpu", "TPU v5p")], "bfloat16") is None


def test_cpu_peak_is_measured_once_for_all_devices(monkeypatch):
    peaks.measure_matmul_peak.cache_clear()
    peak = total_peak(jax.devices(), jax.numpy.float32)
    assert peak is not None and peak.label == "measured matmul peak"
    # Every CPU that runs jax reaches 1 GFLOP/s, and none reaches 1 PFLOP/s.
    assert 1e9 < peak.flops < 1e15
    assert peak_flops(jax.devices()[3], "float32") is peak


def test_cpu_devices_of_several_processes_are_unknown():
    devices = [device("cpu", "cpu", process_index=i) for i in range(2)]
    assert total_peak(devices, "float32") is None


def test_measuring_takes_the_fastest_and_stops_in_time(monkeypatch):
    now = [0.0]
    took = iter([0.050, 0.004, 0.005, *[0.004] * 10, 0.002, *[0.004] * 1000])
    calls = []

    def run(matmul, x):
        calls.append(x.shape[0])
        seconds = next(took)
        now[0] += seconds
        return seconds

    monkeypatch.setattr(peaks, "_seconds", run)
    monkeypatch.setattr(peaks.time, "perf_counter", lambda: now[0])
    peak = peaks.measure_matmul_peak.__wrapped__("float32", 0.3)
    # At 8 * 4 ms the next size is too slow for a budget of 0.3 s.
    assert set(calls) == {512} and now[0] <= 0.3
    assert peak.flops == pytest.approx(2 * 512**3 / 0.002)
