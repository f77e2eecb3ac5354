"""The modelled time of a compiled program, on excerpts, with numbers worked by hand."""

import dataclasses
import json
import re
import subprocess
import sys

import hlo_excerpts
import pytest
import tiny_plans
from paths import ROOT

from meshloom.sharding import hlo
from meshloom.sharding.hlo import text as hlo_text
from meshloom.sharding.hlo.kernels import causal_blocks
from meshloom.sharding.hlo.work import Reader
from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.compile.compiled import Compiled
from meshloom.trainer.plan.compile.program import model_program
from meshloom.trainer.program.hardware import Target, parse_target

V5E = parse_target("v5e:4x4")
FLOPS, HBM = 197e12, 819e9
# fsdp=16 takes both dimensions of 4x4, lines of one link of 50e9 each way.
LINE, BOTH = 50e9, 100e9
# x[4, 2048, 2048] times w[2048, 16, 3, 128].
PRODUCT = 2 * 4 * 2048 * 2048 * 16 * 3 * 128 / FLOPS
SYNC = 2 * 2048 * 16 * 3 * 128 * 15 / 16 / BOTH
CARRIED = 2 * 16 * 128 * 2048 * 15 / 16 / BOTH


def faster(**times: float) -> Target:
    device = V5E.device
    changed = {name: n * getattr(device, name) for name, n in times.items()}
    return dataclasses.replace(V5E, device=dataclasses.replace(device, **changed))


def test_a_carried_gather_is_hidden_and_a_synchronous_one_is_not():
    found = model_program(hlo_excerpts.GATHERS, V5E, {"fsdp": 16})
    assert found.parts == pytest.approx({"network, fsdp": SYNC, "compute": PRODUCT})
    assert found.seconds == pytest.approx(SYNC + PRODUCT)
    assert found.asynchronous() == (1, 2, pytest.approx(CARRIED))
    assert found.flops == hlo.flops(hlo_excerpts.GATHERS) == PRODUCT * FLOPS


def test_what_the_product_does_not_hide_is_waited_for():
    # A product 100 times as fast takes as long as its result needs to memory.
    written = 2 * 4 * 2048 * 16 * 3 * 128 / HBM
    found = model_program(hlo_excerpts.GATHERS, faster(flops=100), {"fsdp": 16})
    assert found.parts["memory"] == pytest.approx(written)
    assert found.parts["network, fsdp"] == pytest.approx(SYNC)
    quick = faster(flops=100, hbm_bandwidth=100)
    found = model_program(hlo_excerpts.GATHERS, quick, {"fsdp": 16})
    left = CARRIED - PRODUCT / 100
    assert found.parts["network, fsdp"] == pytest.approx(SYNC + left)
    assert found.exposed == pytest.approx(SYNC + left)


def test_a_ring_sends_both_ways_at_once_in_a_loop():
    found = model_program(hlo_excerpts.RING, V5E, {"fsdp": 16})
    send = 2 * 16 * 128 * 128 / LINE
    product = 2 * (16 * 128) * (2 * 128) * (4 * 2048) / FLOPS
    # Of the other operand two parts of 128 columns are read, not all 2048; of the sum
    # of 16 layers one is written.
    read = Reader(hlo_text.parse(hlo_excerpts.RING)).work("body", "fusion.489").bytes
    assert read == 2 * 4 * 2048 * 2 * 128
    assert product > read / HBM and product > send
    update = 4 * 16 * 128 * 128 / HBM
    assert found.parts["compute"] == pytest.approx(4 * product)
    assert found.parts["memory"] == pytest.approx(update, rel=1e-3)
    assert found.exposed == 0
    assert found.asynchronous() == (8, 8, pytest.approx(8 * send))
    # With nothing to compute both ways are waited for, at the same time.
    quick = faster(flops=1e6, hbm_bandwidth=1e6)
    found = model_program(hlo_excerpts.RING, quick, {"fsdp": 16})
    assert found.exposed == pytest.approx(4 * send, rel=1e-3)
    one_way = hlo_excerpts.RING.replace("{{0,15},{1,0},", "{{0,1},{1,2},")
    for n in range(2, 16):
        one_way = one_way.replace(f"{{{n},{n - 1}}}", f"{{{n},{(n + 1) % 16}}}")
    found = model_program(one_way, quick, {"fsdp": 16})
    assert found.exposed == pytest.approx(8 * send, rel=1e-3)


def test_prefetched_copies_go_beside_products():
    lines = hlo_excerpts.GATHERS.replace(
        "  %p.1 =",
        "  %p.3 = bf16[4,2048,2048]{1,2,0:T(8,128)(2,1)} parameter(3)\n"
        "  %copy-start.8 = (bf16[4,2048,2048]{1,2,0:T(8,128)(2,1)S(1)}, "
        "bf16[4,2048,2048]{1,2,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%p.3)\n"
        "  %p.1 =",
    )
    done = (
        "  %copy-done.8 = bf16[4,2048,2048]{1,2,0:T(8,128)(2,1)S(1)} "
        "copy-done(%copy-start.8)\n"
    )
    copied = 2 * 4 * 2048 * 2048 / HBM
    late = model_program(
        lines.replace("  ROOT %tuple.1", f"{done}  ROOT %tuple.1"), V5E, {"fsdp": 16}
    )
    assert late.seconds == pytest.approx(SYNC + PRODUCT)
    at_once = model_program(
        lines.replace("  %p.1 =", f"{done}  %p.1 ="), V5E, {"fsdp": 16}
    )
    assert at_once.seconds == pytest.approx(SYNC + PRODUCT + copied)
    assert at_once.parts["memory"] == pytest.approx(copied)


def test_a_sum_on_a_sparse_core_hides_behind_what_comes_after_its_operand():
    target = parse_target("v5p:2x2x4")
    sizes = {"fsdp": 8, "tensor": 2}
    found = model_program(hlo_excerpts.SPARSECORE, target, sizes)
    size = 2 * 8 * 1024 * 768
    copied, summed = 2 * size / 2765e9, size / 100e9  # 2 * 1/2 of it over one link
    assert found.parts["memory"] == pytest.approx(2 * copied)
    assert found.parts["network, tensor"] == pytest.approx(summed - copied)
    assert found.asynchronous() == (1, 1, pytest.approx(copied))


def test_a_collective_that_is_never_met_is_an_error():
    other = hlo_excerpts.SPARSECORE.replace(
        "ROOT %custom-call.37 = ", "ROOT %call.37 = "
    )
    other = other.replace(" custom-call(%param_0.2040)", " call(%param_0.2040)")
    other = other.replace("called_computations={%called", "to_apply={%called")
    with pytest.raises(ValueError, match="called_computation.14 runs all-reduce"):
        model_program(other, parse_target("v5p:2x2x4"), {"fsdp": 8, "tensor": 2})


def test_pairs_of_gpus():
    target = parse_target("h100:2x8")
    found = model_program(hlo_excerpts.GPU, target, {"fsdp": 16})

    # 8 devices of a node over NVLink, and over the network each carries 1/8 for them.
    def seconds(size):
        return size * (7 / 8 / 450e9 + 1 / 2 / 8 / 50e9)

    gather, scatter = (seconds(2 * n) for n in (2048 * 2 * 5632, 2048 * 32000))
    product = 2 * 8192 * 2048 * 2048 / 989.5e12
    reduced = 2 * seconds(4 * 2048)
    assert product < gather
    assert found.parts == pytest.approx(
        {"compute": product, "network, fsdp": gather + scatter - product + reduced}
    )
    assert found.asynchronous() == (2, 3, pytest.approx(product))
    in_one_go = hlo_excerpts.GPU.replace('"is_sync":false', '"is_sync":true')
    found = model_program(in_one_go, target, {"fsdp": 16})
    assert found.seconds == pytest.approx(gather + scatter + reduced + product)
    assert found.asynchronous() == (0, 3, pytest.approx(0))


def test_a_kernel_counts_the_blocks_that_its_mask_leaves():
    assert causal_blocks(4, 4, 512, 512) == 10
    assert causal_blocks(4, 2, 512, 1024) == 6
    found = model_program(hlo_excerpts.KERNEL, parse_target("v5e-1"), {})
    assert found.flops == 2 * 2 * 4 * 10 * 512 * 512 * 128
    # q, v and the result are in main memory; keys and the scratch are not.
    module = hlo_text.parse(hlo_excerpts.KERNEL)
    work = Reader(module).work("main", "splash_mha_fwd_residuals.1")
    assert work.bytes == 3 * 2 * 4 * 2048 * 128 + 16  # and the mask of blocks
    told = hlo_excerpts.KERNEL.replace(
        '"body":', '"cost_estimate":{"bytes_accessed":"1","flops":"12345"},"body":'
    )
    assert model_program(told, parse_target("v5e-1"), {}).flops == 12345
    other = hlo_excerpts.KERNEL.replace("splash_mha", "another")
    found = model_program(other, parse_target("v5e-1"), {})
    assert found.flops == 0
    assert [name.split("/")[-2] for name in found.unknown_kernels] == [
        "another_fwd_residuals"
    ]


def test_attention_of_cudnn_says_the_shape_of_its_scores():
    call = (
        "  %q.1 = bf16[4,2048,16,128]{3,2,1,0} parameter(0)\n"
        "  ROOT %f.1 = bf16[4,16,2048,128]{3,1,2,0} custom-call(%q.1, %q.1, %q.1), "
        'custom_call_target="__cudnn$fmhaSoftmax", backend_config={'
        '"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": '
        '"BF16", "dimensions": ["4", "16", "2048", "2048"]}, "mask_type": "CAUSAL"}}\n'
    )
    head = (
        "HloModule jit_f, is_scheduled=true\n\nENTRY %main (q.1: bf16[4]) -> bf16[] {\n"
    )
    target, scores = parse_target("h100:1x1"), 4 * 16 * 2048 * 2048

    def flops(text):
        return model_program(f"{head}{text}}}\n", target, {}).flops

    assert flops(call) == 2 * 2 * scores * 128 / 2
    assert flops(call.replace("CAUSAL", "NO_MASK")) == 2 * 2 * scores * 128
    backward = call.replace("fmhaSoftmax", "fmhaSoftmaxBackward")
    assert flops(backward) == 5 * 2 * scores * 128 / 2


def test_the_table_of_a_compiled_step_has_its_time():
    found = model_program(hlo_excerpts.GATHERS, V5E, {"fsdp": 16})
    step = forecast(tiny_plans.config(), "v5e:4x4")
    compiled = Compiled(1, 2, 3, 4.0, 5.0, (), modelled=found.summary())
    table = compiled.table(step)
    milliseconds = 1000 * (SYNC + PRODUCT)
    assert f"modelled step {milliseconds:.3g} ms: 1.05 ms compute; 0.236 ms" in table
    assert "asynchronous 1 of 2 collectives, hiding 0.0786 ms" in table
    unknown = dataclasses.replace(compiled, modelled=None)
    assert "modelled step: not known" in unknown.table(step)
    assert json.loads(json.dumps(compiled.to_json()))["modelled"]["asynchronous"] == 1


def test_the_script_reads_any_program(tmp_path):
    text = tmp_path / "step.hlo"
    text.write_text(hlo_excerpts.GATHERS)
    script = ROOT / "benchmarks" / "program.py"
    command = [sys.executable, script, text, "--target", "v5e:4x4"]
    flags = ["--mesh", "shards=16", "--model-flops", "1e11"]
    shown = subprocess.run(
        [*command, *flags], check=True, capture_output=True, text=True
    ).stdout
    assert re.search(r"step, modelled +1.3 ms", shown)
    assert re.search(r"MFU bound +0.396", shown)
    assert re.search(r"all-gather +shards +synchronous +1 +24.0 MiB +0.2 ms", shown)
    assert re.search(r"fusion.510 +compute +1 +1.0 ms +2.06e\+11 +96.0 MiB", shown)
    wrong = [*command, "--mesh", "shards"]
    done = subprocess.run(wrong, capture_output=True, text=True)
    assert done.returncode == 2 and "'shards' is not an axis; expected" in done.stderr


def test_errors_say_what_to_pass():
    with pytest.raises(ValueError, match="for 16 devices, but mesh .* has 8"):
        model_program(hlo_excerpts.GATHERS, V5E, {"fsdp": 8})
    loose = hlo_excerpts.GATHERS.replace("is_scheduled=true, ", "")
    with pytest.raises(ValueError, match="is not scheduled"):
        model_program(loose, V5E, {"fsdp": 16})
