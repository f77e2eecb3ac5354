"""What a config leaves open is chosen for its mesh and devices, and said."""

import dataclasses
import functools
import math
import time
from types import SimpleNamespace

import jax
import pytest
import short_runs
from tiny_plans import config as tiny

from meshloom.models import transformer
from meshloom.sharding.mesh import MeshSpec, mesh_sizes
from meshloom.sharding.plans import AUTO, STANDARD, WITH_SEQUENCE
from meshloom.trainer.config import files as config_files
from meshloom.trainer.plan import forecast, parse_target
from meshloom.trainer.plan.choosing import choose, choose_here
from meshloom.trainer.program import contract
from meshloom.trainer.program.pipelining import Pipelining
from meshloom.trainer.run.prepare import Prepared, prepare
from meshloom.trainer.run.train import Config

GIB = 2**30
PIPE, TENSOR = "pipe=4,fsdp=16", "fsdp=16,tensor=4"


@functools.cache
def load(name: str, *settings: str) -> Config:
    return config_files.load([name], settings, root=Config).config


def chosen(config: Config, target: str, mesh: str) -> Config:
    config = dataclasses.replace(config, mesh=MeshSpec.parse(mesh))
    found = parse_target(target)
    sizes = mesh_sizes(config.mesh.abstract(found.num_devices))
    return choose(config, sizes, found).config


def test_with_a_tensor_axis_the_stream_is_sharded_too():
    found = forecast(load("llama2_7b"), "v5p-128", mesh=TENSOR, batch=128)
    assert found.config.plan == WITH_SEQUENCE
    assert found.memory.peak < 6.5 * GIB  # 12.7 without
    assert "plan data+fsdp+tensor+sequence+pipeline" in found.choice


def test_a_pipeline_has_little_bubble_and_memory():
    found = forecast(load("llama2_7b"), "v5p-128", mesh=PIPE, batch=128)
    pipeline = Pipelining(schedule="interleaved", num_chunks=8, gather="microbatch")
    assert found.config.pipeline == pipeline
    assert found.config.num_microbatches == 8
    # With 1f1b, gathered once a step: 15.8 GiB and 7.8e14.
    assert found.memory.peak < 6 * GIB and found.flops.executed < 4.83e14
    for words in ("interleaved of 8 chunks", "once a microbatch", "8 microbatches"):
        assert words in found.choice


def test_without_full_remat_a_pipeline_takes_memory_for_time():
    fast, lean = (
        forecast(
            load("llama2_7b", f'model.remat="{remat}"'), "v5p-128", mesh=PIPE, batch=n
        )
        for remat, n in (("save-named", 128), ("full", 128))
    )
    assert fast.config.pipeline.gather == "step"
    assert fast.memory.peak > lean.memory.peak
    assert fast.roofline.step < lean.roofline.step


SET = {
    "plan": {"plan": STANDARD},
    "schedule": {"pipeline": Pipelining(schedule="1f1b")},
    "chunks": {"pipeline": Pipelining(num_chunks=2)},
    "gather": {"pipeline": Pipelining(gather="step")},
    "microbatches": {"num_microbatches": 2},
}


@pytest.mark.parametrize("what", SET)
def test_what_is_set_wins(what):
    config = dataclasses.replace(load("llama2_7b"), batch_size=128, **SET[what])
    found = chosen(config, "v5p-128", "pipe=4,fsdp=4,tensor=4")
    free = chosen(
        dataclasses.replace(load("llama2_7b"), batch_size=128),
        "v5p-128",
        "pipe=4,fsdp=4,tensor=4",
    )
    assert found != free
    for name, value in SET[what].items():
        if name != "pipeline":
            assert getattr(found, name) == value
            continue
        given = dataclasses.asdict(value)
        kept = {k: v for k, v in given.items() if v not in (AUTO, None)}
        assert kept.items() <= dataclasses.asdict(found.pipeline).items()


def test_nothing_is_left_open():
    for mesh in ("fsdp=64", TENSOR, PIPE, "pipe=2,fsdp=8,tensor=4"):
        config = dataclasses.replace(load("llama2_7b"), batch_size=128)
        found = chosen(config, "v5p-128", mesh)
        assert AUTO not in (found.plan, *dataclasses.astuple(found.pipeline))
        assert found.num_microbatches is not None
        assert chosen(found, "v5p-128", mesh) == found


def test_a_batch_that_does_not_fit_is_done_in_parts():
    whole = load("llama3_8b", "num_microbatches=1")
    assert not forecast(whole, "v5e-64").fits
    found = forecast(load("llama3_8b"), "v5e-64")
    assert found.fits and found.config.num_microbatches > 1
    fewer = load("llama3_8b", f"num_microbatches={found.config.num_microbatches // 2}")
    assert forecast(fewer, "v5e-64").memory.peak > 0.9 * found.target.device.usable
    assert f"{found.config.num_microbatches} microbatches" in found.choice


def test_a_head_that_takes_most_memory_is_computed_in_blocks():
    found = forecast(load("llama3_8b"), "v5p-64", mesh="fsdp=32", batch=512)
    at_once = load("llama3_8b", "model.head_block=0", "num_microbatches=1")
    whole = forecast(at_once, "v5p-64", mesh="fsdp=32", batch=512)
    assert whole.config.model == at_once.model  # what is set is kept
    assert whole.memory.peak_moment == "head" and not whole.fits
    block = found.config.model.head_block  # type: ignore
    assert block and f"logits of {block} tokens at a time" in found.choice
    # The largest with which the head is no longer the peak; then more changes nothing.
    assert found.memory.peak_moment == "backward" and found.case.num_microbatches == 1
    larger = load("llama3_8b", f"model.head_block={2 * block}", "num_microbatches=1")
    larger = forecast(larger, "v5p-64", mesh="fsdp=32", batch=512).memory
    assert larger.peak_moment == "head"
    assert found.memory.at["backward"] == larger.at["backward"]
    assert found.roofline.step < 1.002 * whole.roofline.step
    chosen_again = load("llama3_8b", f"model.head_block={block}")
    assert "tokens" not in forecast(chosen_again, "v5p-64", mesh="fsdp=32").choice


def test_a_head_that_takes_less_than_blocks_is_left_alone():
    found = forecast(load("llama2_7b"), "v5p-128", mesh="fsdp=64", batch=64)
    assert found.memory.peak_moment == "backward"
    assert found.config.model.head_block is None  # type: ignore
    assert found.case.head_blocks == 1 and "tokens" not in found.choice


def test_positions_that_the_axis_does_not_divide_stay_whole():
    c = dataclasses.replace(tiny(remat="full"), plan=AUTO)
    odd = dataclasses.replace(c, data=dataclasses.replace(c.data, length=127))
    assert chosen(c, "v5e-8", "fsdp=2,tensor=4").plan == WITH_SEQUENCE
    assert chosen(odd, "v5e-8", "fsdp=2,tensor=4").plan == STANDARD


def chips(num: int, kind: str = "TPU v5p") -> list[SimpleNamespace]:
    """A slice of 4 x 4 x num/16 chips, as jax shows it to every process."""
    return [
        SimpleNamespace(
            device_kind=kind,
            platform="tpu",
            slice_index=0,
            process_index=i // 4,
            coords=(i % 4, i // 4 % 4, i // 16),
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("mesh", ["fsdp=64", TENSOR, PIPE])
def test_a_run_chooses_what_the_plan_said(mesh):
    config = dataclasses.replace(
        load("llama2_7b"), batch_size=128, mesh=MeshSpec.parse(mesh)
    )
    sizes = mesh_sizes(config.mesh.abstract(64))
    found = choose_here(config, sizes, chips(64))
    assert found == choose_here(config, sizes, list(reversed(chips(64))))
    assert found.config == forecast(config, "v5p-128").config
    assert found.given is config


def test_choosing_takes_no_time():
    config = dataclasses.replace(load("llama3_70b"), batch_size=4096)
    chosen(config, "v5p-512", "pipe=16,fsdp=16")
    begin = time.process_time()
    chosen(config, "v5p-512", "pipe=8,fsdp=16,tensor=2")
    assert time.process_time() - begin < 1  # 0.1 s on a quiet machine


class Broken(transformer.Config):
    def costs(self, *_, **__):
        raise KeyError("x")


def test_what_cannot_be_compared_is_plain_and_says_so():
    sizes = mesh_sizes(MeshSpec.parse("fsdp=2,tensor=4").abstract())
    target = parse_target("v5e-8")
    c = dataclasses.replace(tiny(), plan=AUTO)
    broken = dataclasses.replace(c, model=Broken(**vars(c.model)))
    found = choose(broken, sizes, target)
    assert found.config.plan == STANDARD and "the plain settings: 'x'" in found.line
    odd = [SimpleNamespace(device_kind="Tachyon", platform="tpu")] * 8
    found = choose_here(c, sizes, odd)
    assert found.config.plan == STANDARD
    assert found.line.endswith("plain settings, the figures of Tachyon are not known")


def prepared(config: Config, mesh: str) -> Prepared:
    """As the command line prepares a run, which chooses what is open."""
    spec = MeshSpec.parse(mesh)
    devices = jax.devices()[: math.prod(spec.abstract().axis_sizes)]
    config = dataclasses.replace(config, mesh=spec)
    return prepare(config, devices, choose=choose_here)


def test_on_cpus_the_settings_are_plain():
    c = dataclasses.replace(tiny(), plan=AUTO, pipeline=Pipelining(), eval_batches=0)
    found = prepared(c, "pipe=2,data=2,tensor=2")
    plain = short_runs.prepare(tiny(), "pipe=2,data=2,tensor=2")
    assert found.program.rules == plain.program.rules
    assert found.staging.schedule.name == "1f1b"
    assert found.chosen.config.pipeline.gather == "step"
    line = (
        "Chosen: plan data+fsdp+tensor+pipeline, 1f1b, weights gathered once a step: "
        "the plain settings, on CPUs nothing is compared"
    )
    assert line in found.describe()
    assert not prepared(c, "data=4").chosen.line


def test_a_model_with_variables_keeps_one_microbatch(monkeypatch):
    """A batch norm computes something else by microbatch, so a run would change."""
    big = load("llama2_7b", 'model.remat="full"', "batch_size=4096")
    assert chosen(big, "v5e-64", "fsdp=64").num_microbatches > 1
    monkeypatch.setattr(contract, "has_variables", lambda model: True)
    assert chosen(big, "v5e-64", "fsdp=64").num_microbatches == 1
