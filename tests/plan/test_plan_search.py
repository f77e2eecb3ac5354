"""The search for the best plan, against all plans tried one by one."""

import collections
import dataclasses
import itertools
import math

import pytest
from tiny_plans import config

from meshloom.sharding import MeshSpec
from meshloom.trainer.config import files as config_files
from meshloom.trainer.plan import forecast, parse_target, search
from meshloom.trainer.plan.searching.candidates import REMATS, all_meshes
from meshloom.trainer.plan.searching.reasons import causes, kinds, reasons
from meshloom.trainer.plan.searching.searching import smallest
from meshloom.trainer.program.hardware import sizes_of
from meshloom.trainer.program.pipelining import Pipelining
from meshloom.trainer.run.train import Config

BATCH, LAYERS = 16, 4
# So little memory that some plans of the tiny model fit on 8 of them and some do not.
SMALL = "own:2x4,flops=1e13,hbm=14e6,hbm_bandwidth=1e11,link=1e9,network=2e8"


def tiny() -> Config:
    return dataclasses.replace(config(), batch_size=BATCH)


def key(mesh, remat, num, schedule="", chunks=1):
    return str(mesh), remat, num, schedule, chunks


def one_by_one(target: str) -> dict:
    """Every plan that can be made, asking only whether it can."""
    found = {}
    total = parse_target(target).num_devices
    sizes = [n for n in range(1, total + 1) if total % n == 0]
    for pipe, data, fsdp, tensor in itertools.product(sizes, repeat=4):
        if pipe * data * fsdp * tensor != total:
            continue
        spec = MeshSpec(pipe=pipe, data=data, fsdp=fsdp, tensor=tensor)
        ways = [("", 1)]
        if pipe > 1:
            chunks = [("interleaved", n) for n in range(2, LAYERS + 1)]
            ways = [("gpipe", 1), ("1f1b", 1), *chunks]
        for (name, num_chunks), num, remat in itertools.product(
            ways, range(1, BATCH + 1), REMATS
        ):
            try:
                pipeline = Pipelining()
                if name:
                    pipeline = Pipelining(
                        schedule=name, num_chunks=num_chunks if num_chunks > 1 else None
                    )
                c = dataclasses.replace(
                    config(remat=remat),
                    batch_size=BATCH,
                    num_microbatches=num,
                    pipeline=pipeline,
                )
                made = forecast(c, target, mesh=spec)
            except ValueError:
                continue
            found[key(spec, remat, num, name, num_chunks)] = made
    return found


def key_of(candidate):
    c = candidate.choice
    return key(c.mesh, c.remat, c.num_microbatches, c.schedule, c.num_chunks)


@pytest.fixture(scope="module")
def brute():
    return one_by_one(SMALL)


@pytest.fixture(scope="module")
def found():
    return search(tiny(), SMALL)


def test_every_plan_that_can_be_made_is_looked_at_once(brute, found):
    keys = [key_of(c) for c in found.candidates]
    assert len(keys) == len(set(keys)) > 400
    assert set(keys) == set(brute)
    assert found.num_meshes == len({mesh for mesh, *_ in brute})


def test_those_fit_that_fit_and_the_best_is_the_fastest_of_them(brute, found):
    fitting = {k: p.seconds_an_example for k, p in brute.items() if p.fits}
    assert 0 < len(fitting) < len(brute)
    assert {key_of(c): c.seconds for c in found.fitting} == fitting
    assert found.best.seconds == min(fitting.values())
    seconds = [c.seconds for c in found.fitting]
    assert seconds == sorted(seconds)


def test_meshes_are_passed_over_whose_state_is_too_much(brute):
    found = search(tiny(), SMALL.replace("hbm=14e6", "hbm=6e6"))
    usable = found.target.device.usable
    passed = {key_of(c): c.peak for c in found.candidates if c.is_bound}
    states = {k: p.memory.arguments for k, p in brute.items()}
    assert passed == {k: state for k, state in states.items() if state > usable}
    assert 0 < len(passed) < len(brute)


def test_the_leanest_is_the_leanest_of_all(brute):
    found = search(tiny(), SMALL.replace("hbm=14e6", "hbm=1e6"))
    assert found.best is None and all(c.is_bound for c in found.candidates)
    least = min(p.memory.peak for p in brute.values())
    assert found.leanest().memory.peak == least


def test_finalists_are_the_best_of_each_mesh(found):
    chosen = found.finalists(4)
    assert len({str(c.choice.mesh) for c in chosen}) == 4
    assert chosen[0] is found.best
    for candidate in found.fitting:
        if candidate.seconds < chosen[-1].seconds:
            assert str(candidate.choice.mesh) in {str(c.choice.mesh) for c in chosen}


def test_reasons_are_true_of_the_numbers(brute, found):
    """Each is made again from the plans that were tried one by one."""
    given = reasons(found)
    assert {r.slower is None for r in given} == {True, False}
    groups = collections.defaultdict(list)
    for candidate in found.candidates:
        for kind in kinds(candidate.choice, found.best.choice).values():
            groups[kind].append(brute[key_of(candidate)])
    best = brute[key_of(found.best)]
    for reason in given:
        group = groups[reason.kind]
        fitting = [p.seconds_an_example for p in group if p.fits]
        if reason.slower is None:
            assert not fitting
            peak = min(p.memory.peak for p in group)
            assert f"{peak / found.target.device.usable:.0%} of memory" in reason.why
            continue
        assert reason.slower == min(fitting) / best.seconds_an_example >= 1
        mine, others = causes(reason.forecast), causes(best)
        grown = {name: mine[name] - others.get(name, 0.0) for name in mine}
        most = max(grown, key=lambda name: grown[name])
        words = {"compute": "executes"}.get(most, most.removeprefix("network, "))
        assert words in reason.why
        if most != "compute":
            share = mine[most] / reason.forecast.roofline.step
            assert reason.why.startswith(f"{share:.0%} of the step")
    own = kinds(found.best.choice, found.best.choice)
    assert not set(own.values()) & {reason.kind for reason in given}


def test_causes_are_the_whole_step(found):
    pipes = [c for c in found.fitting if c.choice.schedule]
    for candidate in (pipes[0], pipes[-1], found.best):
        made = found.forecast(candidate)
        total = sum(causes(made).values())
        assert math.isclose(total, made.roofline.step)
    bubble = causes(found.forecast(pipes[0]))["bubble"]
    assert bubble > 0


def test_thousands_of_plans_of_a_real_model():
    c = config_files.load(["llama3_8b"], root=Config).config
    found = search(c, "v5p-64")
    assert len(found.candidates) > 4000
    best = found.forecast(found.best)
    assert best.fits and best.seconds_an_example == found.best.seconds
    tensor = {c.choice.mesh.tensor for c in found.candidates}
    assert tensor == {1, 2, 4, 8}  # 8 heads of keys


def test_slices_are_crossed_by_data_or_pipe():
    specs = all_meshes(tiny(), parse_target("2xv5e:2x2"))
    assert {axis for s in specs for axis in s.dcn} == {"data", "pipe"}
    assert all(math.prod(s.dcn.values()) == 2 for s in specs)
    best = search(tiny(), "2xv5e:2x2").best
    assert math.prod(best.choice.mesh.dcn.values()) == 2


def test_an_axis_that_the_plan_does_not_use_stays_one():
    c = dataclasses.replace(tiny(), plan="data+fsdp")
    specs = all_meshes(c, parse_target("v5e:2x4"))
    assert {(s.tensor, s.pipe) for s in specs} == {(1, 1)}
    assert {s.fsdp for s in specs} == {1, 2, 4, 8}


def test_tensor_leaves_a_node_only_if_it_wins():
    """On nodes of 2: with a slow network between them it stays inside, else not."""
    c = dataclasses.replace(tiny(), batch_size=4)
    device = "own:4x2,flops=1e13,hbm=14e6,hbm_bandwidth=1e12,link=1e11,network="
    slow, fast = (search(c, device + speed).best.choice for speed in ("1e8", "1e10"))
    assert slow.mesh.tensor == 2
    assert fast.mesh.tensor == 4


def test_sizes_of_devices():
    def names(text, most=4096):
        return [t.name for t in sizes_of(parse_target(text), most)]

    assert names("v5e-16")[:3] == ["v5e-1", "v5e-4", "v5e-8"]
    assert names("v5e-16")[-2:] == ["8xv5e-256", "16xv5e-256"]
    assert names("v5p-64", 64) == ["v5p-8", "v5p-16", "v5p-32", "v5p-64", "v5p-128"]
    assert names("h100:3x8", 32) == [
        f"h100:{n}" for n in ("1x1", "1x2", "1x4", "1x8")
    ] + [
        "h100:2x8",
        "h100:4x8",
    ]
    for text in ("v5e-16", "v4-8", "h100:1x8", SMALL):
        for size in sizes_of(parse_target(text)):
            assert parse_target(size.name) == size


def test_the_smallest_is_the_first_on_which_anything_fits():
    target = parse_target(SMALL)
    least = smallest(tiny(), target)
    sizes = sizes_of(target)
    fits = [search(tiny(), size).best is not None for size in sizes[:5]]
    assert least.target == sizes[fits.index(True)] and fits.index(True) > 0
    assert smallest(tiny(), target, more_than=4096) is None


def test_a_head_in_blocks_makes_faster_plans_fit():
    target = "own:1x2,flops=1e14,hbm=20e9,hbm_bandwidth=1e12,link=1e11,network=1e10"
    settings = ["model.num_layers=2", "batch_size=2", "model.head_block=0"]
    at_once, found = (
        search(config_files.load(["llama3_8b"], given, root=Config).config, target)
        for given in (settings, settings[:2])
    )
    assert {c.choice.head_block for c in at_once.candidates} == {None}
    best = found.best_forecast
    assert best.fits and best.config.model.head_block == found.best.choice.head_block
    assert ", head " in found.best.choice.in_parts
    assert found.best.seconds < at_once.best.seconds
    # The largest block that fits.
    whole = dataclasses.replace(found.best.choice, head_block=None)
    larger = dataclasses.replace(whole, head_block=2 * found.best.choice.head_block)
    for choice in (whole, larger):
        assert not found.forecast(dataclasses.replace(found.best, choice=choice)).fits
