"""Which arrays make up the peak: exact in sum, and each as the rules shard it."""

import dataclasses
import json
import math

import pytest
from tiny_plans import B, D, L, V, config

from meshloom.trainer import cli
from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.arrays import Weights, rows
from meshloom.trainer.plan.explain import by_part, explain, stages
from meshloom.trainer.plan.memory import part
from meshloom.trainer.program.pipelining import Pipelining

MESHES = ["fsdp=8", "fsdp=4,tensor=2", "pipe=2,fsdp=2,tensor=2", "pipe=4,fsdp=2"]
SIZES = {"float32": 4, "bfloat16": 2, "bool": 1, "int32": 4}


def found(mesh, target="h100:1x8", pipeline=None, **settings):
    made = config(**settings)
    if pipeline is not None:
        made = dataclasses.replace(made, pipeline=pipeline)
    return forecast(made, target, mesh=mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("remat", ["none", "save-named", "save-dots", "full"])
@pytest.mark.parametrize("target", ["h100:1x8", "v5e:2x4", "v5p-16"])
def test_the_arrays_sum_to_every_part_and_to_the_peak(mesh, remat, target):
    it = found(mesh, target, remat=remat, num_microbatches=4)
    for parts in (it.memory.state, *it.memory.moments.values()):
        for one in parts:
            assert sum(row.bytes for row in rows(it.case, one)) == one.bytes, one
            is_named = bool(one.arrays) or not one.bytes
            assert is_named == (one.name not in ("batch", "workspace")), one
    total = sum(row.bytes for _, arrays in by_part(it) for row in arrays)
    assert total == it.memory.peak


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipelining(schedule="interleaved"),
        Pipelining(schedule="gpipe"),
        Pipelining(gather="microbatch"),
    ],
)
def test_so_they_do_with_other_pipelines(pipeline):
    it = found("pipe=2,fsdp=4", "v5e:2x4", pipeline, num_microbatches=4)
    total = sum(row.bytes for _, arrays in by_part(it) for row in arrays)
    assert total == it.memory.peak


def test_what_is_rounded_still_sums():
    case = found("fsdp=8").case
    seventh = part(case, "a seventh", "", Weights("params", times=1 / 7))
    arrays = rows(case, seventh)
    each = [b / 7 for b in case.sharded.resident("params").values()]
    assert sum(map(round, each)) != seventh.bytes == round(sum(each))
    assert sum(row.bytes for row in arrays) == seventh.bytes


@pytest.mark.parametrize("mesh", MESHES)
def test_bytes_are_those_of_the_shape_that_is_shown(mesh):
    """Without tiles; what is not exact is the rounding of one array of a part."""
    for _, arrays in by_part(found(mesh, remat="save-named")):
        for row in arrays:
            if row.shape:
                size = row.count * SIZES[row.dtype] * math.prod(row.cut)
                assert abs(row.bytes - size) <= 1, row
                assert all(n % c == 0 for n, c in zip(row.shape, row.cut, strict=True))
                assert len(row.axes) == len(row.shape)


def test_a_row_has_the_array_whole_and_cut():
    it = found("fsdp=4,tensor=2")
    parts = {name: {row.name: row for row in arrays} for name, arrays in by_part(it)}
    qkv = parts["parameters"]["blocks/attention/qkv"]
    assert qkv.axes == ("layer", "embed", "kv_heads", None, "head_dim")
    assert (qkv.shape, qkv.cut) == ((4, D, 4, 3, 64), (4, D // 4, 2, 3, 64))
    assert qkv.dtype == "float32" and qkv.count == 1
    kept = parts["kept"]["block input"]
    assert (kept.shape, kept.cut, kept.count) == ((B, L, D), (B // 4, L, D), 4)
    assert kept.dtype == "bfloat16" and kept.bytes == 4 * 2 * B * L * D // 4
    # Gathered for one of four blocks; still sharded by tensor.
    whole = parts["weights, gathered"]["blocks/attention/qkv"]
    assert (whole.cut, whole.count) == ((4, D, 2, 3, 64), 1 / 4)


def test_stages_differ_in_layers_and_in_slots_that_are_filled():
    it = found("pipe=4,fsdp=2", remat="full", num_microbatches=8)
    shown = stages(it.case)
    assert [stage["layers"] for stage in shown] == [[0], [1], [2], [3]]
    # Against the places that the executor's own table gives to inputs.
    places = it.case.pipeline.schedule.slots.max(axis=(1, 2)) + 1
    assert [stage["in_flight"] for stage in shown] == places.tolist() == [7, 5, 3, 1]
    text = explain(it)
    assert "7 slots for inputs in flight are on every stage" in text
    assert "sharded over the stages: embedding, head" in text
    assert "replicated over the stages: final_norm/scale" in text
    assert stages(found("fsdp=8").case) == [] and "stage" not in explain(
        found("fsdp=8")
    )


def test_interleaved_stages_have_chunks_of_layers():
    chunks = Pipelining(schedule="interleaved", num_chunks=2)
    it = found("pipe=2,fsdp=4", pipeline=chunks, num_microbatches=4, num_layers=8)
    assert [s["layers"] for s in stages(it.case)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert "0-1, 4-5" in explain(it)


def test_small_arrays_are_one_row():
    text = explain(found("fsdp=8", vocab_size=100 * V))
    assert " smaller " in text and "final_norm/scale" not in text
    assert " 1 smaller" not in text


def test_the_command_lists_them(capsys):
    argv = "plan --config gpt2_124m --target v5e-16 --explain".split()
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "the peak of a device: " in text and "when the" in text
    assert "    block input " in text and " smaller " in text
    assert cli.main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    total = sum(row["bytes"] for row in document["explain"]["arrays"])
    assert total == document["memory"]["peak"]
    assert document["explain"]["stages"] == []
