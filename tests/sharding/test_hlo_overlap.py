"""Finding overlapped collectives, in every form that compilers write them."""

import hlo_excerpts
import pytest

from meshloom.sharding.hlo import text as hlo_text
from meshloom.sharding.hlo.overlap import schedule


def scheduled(text):
    return {
        (s.op.kind, s.start): (s.done, s.carriers)
        for s in schedule(hlo_text.parse(text))
    }


def test_a_gather_carried_by_fusions_is_asynchronous():
    assert scheduled(hlo_excerpts.GATHERS) == {
        ("all-gather", "all-gather.152"): ("", 0),
        ("all-gather", "async-collective-start"): ("async-collective-done", 1),
    }


def test_permutes_of_a_ring_are_asynchronous():
    assert scheduled(hlo_excerpts.RING) == {
        ("collective-permute", f"collective-permute-start.{n}"): (
            f"collective-permute-done.{n}",
            0,
        )
        for n in (4, 5)
    }


def test_pairs_on_gpus_are_asynchronous_unless_marked_sync():
    assert scheduled(hlo_excerpts.GPU) == {
        ("all-gather", "all-gather-start.4"): ("all-gather-done.4", 0),
        ("reduce-scatter", "reduce-scatter-start.1"): ("reduce-scatter-done.1", 0),
        ("all-reduce", "all-reduce-start.9"): ("", 0),
    }


def test_a_sum_on_a_sparse_core_begins_with_its_operand():
    begin = "all-reduce.84.cloned.1.call-update"
    assert scheduled(hlo_excerpts.SPARSECORE) == {
        ("all-reduce", begin): ("all-reduce.84.cloned.1.call-done", 0)
    }


def test_a_start_without_its_done_is_an_error():
    lost = hlo_excerpts.GATHERS.replace('"AsyncCollectiveDone"', '"Other"')
    with pytest.raises(ValueError, match="all-gather.73 on channel 58 is started by"):
        schedule(hlo_text.parse(lost))
    lost = hlo_excerpts.GPU.replace(
        "all-gather-done(%all-gather-start.4)", "copy(%p.0)"
    )
    assert scheduled(lost)["all-gather", "all-gather-start.4"] == ("", 0)


def test_a_done_without_its_start_is_an_error():
    other = "all-gather-done(%p.0)"
    text = hlo_excerpts.GPU.replace("all-gather-done(%all-gather-start.4)", other)
    with pytest.raises(
        ValueError, match="all-gather-done.4 waits for p.0, a parameter"
    ):
        schedule(hlo_text.parse(text))


def test_an_instruction_may_span_several_lines():
    entry = hlo_text.parse(hlo_excerpts.KERNEL).computations["main"]
    kernel = entry.instructions["splash_mha_fwd_residuals.1"]
    assert kernel.op_name().endswith("splash_mha_fwd_residuals/pallas_call")
    assert "TUzvUgFNTElSMjIuMC4wZ2l0AAE=" in kernel.rest
    assert list(entry.instructions)[-1] == "get-tuple-element.1"
