"""What a run says of its own step at its start, and how it is compared at the end."""

import dataclasses
import io
import json
import types

import jax
import pytest
from paths import TINY
from rich.console import Console
from tiny_plans import config as big_config

from meshloom.models import transformer
from meshloom.sharding import MeshSpec
from meshloom.sharding.text import seconds_text
from meshloom.trainer.commands.forecast_observer import ForecastObserver
from meshloom.trainer.config import files as config_files
from meshloom.trainer.plan import forecast, run_forecast
from meshloom.trainer.plan.comparison import compare
from meshloom.trainer.plan.local_target import target_here
from meshloom.trainer.program import peaks
from meshloom.trainer.record import metrics
from meshloom.trainer.run import train
from meshloom.trainer.run.prepare import prepare

GIB = 2**30


def chip(kind, coords=(0, 0, 0), slice_index=0, platform="tpu", stats=None):
    return types.SimpleNamespace(
        platform=platform,
        device_kind=kind,
        coords=coords,
        slice_index=slice_index,
        process_index=0,
        memory_stats=lambda: stats,
    )


def grid(kind, x, y, z=1, **more):
    return [
        chip(kind, (i, j, k), **more)
        for i in range(x)
        for j in range(y)
        for k in range(z)
    ]


@pytest.fixture(scope="module")
def tiny():
    config = config_files.load([TINY], root=train.Config).config
    return dataclasses.replace(config, mesh=MeshSpec(data=2, fsdp=4))


def test_tpus_are_the_slices_that_their_coordinates_make():
    one = target_here(grid("TPU v5 lite", 4, 4), "bfloat16")
    assert (one.name, one.shape, one.num_slices) == ("v5e:4x4", (4, 4), 1)
    assert one.device.flops == 197e12 and one.device.usable == 15.75 * GIB
    two = [*grid("TPU v5p", 2, 2, 4), *grid("TPU v5p", 2, 2, 4, slice_index=1)]
    found = target_here(two, "bfloat16")
    assert (found.name, found.num_devices) == ("2xv5p:2x2x4", 32)
    with pytest.raises(ValueError, match="3 v5e devices are not whole slices"):
        target_here(grid("TPU v5 lite", 2, 2)[:3], "bfloat16")


def test_gpus_are_spread_over_hosts():
    stats = {"bytes_limit": 60 * GIB}
    gpus = [chip("NVIDIA H100 80GB HBM3", platform="gpu", stats=stats)] * 16
    found = target_here(gpus, "bfloat16", ["a", "b"])
    assert (found.name, found.shape, found.num_slices) == ("h100:2x8", (8,), 2)
    assert found.device.usable == 60 * GIB  # what the device says, not the table
    # A float32 product runs as TF32, at half the speed.
    assert target_here(gpus, "float32").device.flops == 494.5e12
    with pytest.raises(ValueError, match="16 devices are not spread evenly on 3"):
        target_here(gpus, "bfloat16", ["a", "b", "c"])


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        ([chip("NVIDIA L4", platform="gpu")], "the figures of NVIDIA L4 are not known"),
        ([chip("TPU v2")], "the figures of TPU v2 are not known"),
        ([chip("TPU v4"), chip("TPU v5p")], "the devices differ: TPU v4, TPU v5p"),
    ],
)
def test_devices_without_numbers_are_said(devices, match):
    with pytest.raises(ValueError, match=match):
        target_here(devices, "bfloat16")


def test_cpu_devices_share_what_was_measured_of_the_machine():
    one, eight = (target_here(jax.devices()[:num], "float32") for num in (1, 8))
    for name in ("flops", "hbm", "hbm_bandwidth", "link"):
        whole, part = getattr(one.device, name), getattr(eight.device, name)
        assert whole == pytest.approx(8 * part), name
    assert one.device.flops == peaks.measure_matmul_peak("float32").flops
    assert 1e8 < one.device.hbm_bandwidth < 1e13
    assert eight.device.source == "measured here"


def test_on_a_cpu_attention_stores_its_scores():
    """In bfloat16 a GPU's kernel would not; nothing else differs."""
    config = dataclasses.replace(big_config(), mesh=MeshSpec(fsdp=8))
    cpu = forecast(config, target_here(jax.devices(), "bfloat16"))
    gpu = forecast(config, "h100:1x8")
    assert cpu.case.costs.working != gpu.case.costs.working
    assert cpu.memory.arguments == gpu.memory.arguments


def test_the_line_at_the_start(tiny):
    found = run_forecast.forecast_run(prepare(tiny), 0)
    assert found.forecast is not None, found.reason
    words = found.line()
    assert words.startswith("Forecast: ") and "\n" not in words
    # Of time there is none on CPUs: a roofline of peaks says little about them.
    assert words.endswith("of its memory") and "step" not in words
    assert found.seconds is None and found.to_json()["seconds"] is None
    target = forecast(tiny, "v5e-8").target
    chips = dataclasses.replace(found.forecast.case, target=target)
    other = run_forecast.RunForecast(0, dataclasses.replace(found.forecast, case=chips))
    assert "a step, for v5e-8 with" in other.line()
    assert other.line().endswith("a device, published")


class Costless:
    """A model without what a plan needs."""


class Broken(transformer.Config):
    def costs(self, *_, **__):
        raise KeyError("x")


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda _: Costless(), "No forecast: model Costless has no method `costs`, so "
         "a forecast cannot know what its step keeps and multiplies"),
        (lambda m: Broken(**vars(m)), "No forecast: KeyError: 'x'"),
    ],
)  # fmt: skip
def test_without_a_forecast_the_line_says_why(tiny, wrap, words):
    prepared = prepare(tiny)
    other = dataclasses.replace(tiny, model=wrap(tiny.model))
    chosen = dataclasses.replace(prepared.chosen, config=other)
    found = run_forecast.forecast_run(dataclasses.replace(prepared, chosen=chosen), 4)
    assert found.line() == words
    assert found.to_json() == {
        "start": 4,
        "reason": words.removeprefix("No forecast: "),
    }
    assert compare(found.to_json()) == []


def document(memory, seconds, of="compiler's"):
    found = {"memory": memory, "memory_of": of, "seconds": seconds}
    expected = {"memory": {"peak": 3 * GIB}}
    return {"start": 0, "seconds": 0.5, "plan": expected, "measured": found}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (3.5e-7, "0.35 µs"),
        (0.0125, "12.5 ms"),
        (0.9999, "1 s"),
        (0.9994, "999 ms"),
        (999.7, "1,000 s"),
        (59.94, "59.9 s"),
        (4680.2, "4,680 s"),
    ],
)
def test_times_are_short(seconds, words):
    assert seconds_text(seconds) == words


def test_the_line_at_the_end():
    (line,) = compare(document(2 * GIB, 0.625))
    assert line == (
        "Forecast 3.0 GiB and 500 ms a step; compiler's 2.0 GiB (forecast 1.50 of it), "
        "median step 625 ms (0.80)"
    )
    (line,) = compare(document(2 * GIB, 6.0) | {"seconds": None})
    assert line == (
        "Forecast 3.0 GiB; compiler's 2.0 GiB (forecast 1.50 of it), median step 6 s"
    )
    (line,) = compare(document(None, None))
    assert line.endswith("a step; memory unknown, no step time: too few steps")


def test_a_forecast_that_was_far_off_says_which():
    line, memory = compare(document(GIB, 0.5))
    assert memory == "Memory is far off: 0.333 times its forecast"
    line, step = compare(document(3 * GIB, 1.5))
    assert step == "The step time is far off: 3 times its forecast"
    assert len(compare(document(30 * GIB, 5.0))) == 3


def test_memory_is_the_devices_own_where_they_know_it(tiny, tmp_path):
    prepared = prepare(tiny)
    reserved = prepared.compile().memory_analysis()
    metrics.JsonLines(tmp_path / "metrics.jsonl").write(
        [{"step": n, "loss": 1.0, "step_s": s} for n, s in enumerate((9, 9, 3, 1, 2))]
    )
    found = run_forecast.measure(prepared, tmp_path, start=1)
    assert found.memory_of == "compiler's" and found.seconds == 2
    assert found.memory == (
        reserved.argument_size_in_bytes + reserved.temp_size_in_bytes
    )
    used = [chip("TPU v4", stats={"peak_bytes_in_use": n}) for n in (5, 7)]
    mesh = types.SimpleNamespace(local_devices=used)
    program = dataclasses.replace(prepared.program, mesh=mesh)
    there = dataclasses.replace(prepared, program=program)
    found = run_forecast.measure(there, tmp_path, 1)
    assert (found.memory, found.memory_of) == (7, "in use at most")


def test_a_run_foretells_and_compares(tiny, tmp_path):
    def run(**changes):
        console = Console(file=io.StringIO(), width=300)
        train.train(
            dataclasses.replace(tiny, eval_batches=0, save_every=0, **changes),
            workdir=tmp_path / "run",
            console=console,
            insist=True,
            observer=ForecastObserver(),
        )
        content = json.loads((tmp_path / "run" / run_forecast.FILE).read_text())
        return console.file.getvalue().splitlines(), content  # type: ignore

    lines, content = run()
    start = next(n for n, line in enumerate(lines) if line.startswith("Forecast: "))
    assert lines[start + 1] == "Compiling the train step ..."
    for line in compare(content):
        assert line in lines[start + 2 :]
    assert content["start"] == 0 and content["measured"]["seconds"] > 0
    # A complete run makes no new forecast; one that goes on makes one of its own.
    again, same = run()
    assert same == content and not any("orecast" in line for line in again)
    lines, content = run(num_steps=16)
    assert content["start"] == 12 and any("Forecast: " in line for line in lines)
