"""Which collectives run beside other work, in the forms in which compilers say so."""

import hlo_excerpts
import pytest

from meshloom.sharding.hlo import text as hlo_text
from meshloom.sharding.hlo.overlap import place


def placed(text):
    return {
        (p.found.kind, p.start): (p.done, p.carriers)
        for p in place(hlo_text.parse(text))
    }


def test_a_gather_that_fusions_carry_along():
    assert placed(hlo_excerpts.GATHERS) == {
        ("all-gather", "all-gather.152"): ("", 0),
        ("all-gather", "async-collective-start"): ("async-collective-done", 1),
    }


def test_permutes_of_a_ring():
    assert placed(hlo_excerpts.RING) == {
        ("collective-permute", f"collective-permute-start.{n}"): (
            f"collective-permute-done.{n}",
            0,
        )
        for n in (4, 5)
    }


def test_pairs_of_gpus_and_one_that_runs_in_one_go():
    assert placed(hlo_excerpts.GPU) == {
        ("all-gather", "all-gather-start.4"): ("all-gather-done.4", 0),
        ("reduce-scatter", "reduce-scatter-start.1"): ("reduce-scatter-done.1", 0),
        ("all-reduce", "all-reduce-start.9"): ("", 0),
    }


def test_a_sum_that_a_sparse_core_does_begins_with_its_operand():
    begin = "all-reduce.84.cloned.1.call-update"
    assert placed(hlo_excerpts.SPARSECORE) == {
        ("all-reduce", begin): ("all-reduce.84.cloned.1.call-done", 0)
    }


def test_a_start_without_its_done_is_an_error():
    lost = hlo_excerpts.GATHERS.replace('"AsyncCollectiveDone"', '"Other"')
    with pytest.raises(ValueError, match="all-gather.73 on channel 58 is started by"):
        place(hlo_text.parse(lost))
    lost = hlo_excerpts.GPU.replace(
        "all-gather-done(%all-gather-start.4)", "copy(%p.0)"
    )
    assert placed(lost)["all-gather", "all-gather-start.4"] == ("", 0)


def test_a_done_that_waits_for_no_start_is_an_error():
    other = "all-gather-done(%p.0)"
    text = hlo_excerpts.GPU.replace("all-gather-done(%all-gather-start.4)", other)
    with pytest.raises(
        ValueError, match="all-gather-done.4 waits for p.0, a parameter"
    ):
        place(hlo_text.parse(text))


def test_an_instruction_may_take_several_lines():
    entry = hlo_text.parse(hlo_excerpts.KERNEL).computations["main"]
    kernel = entry.instructions["splash_mha_fwd_residuals.1"]
    assert kernel.op_name().endswith("splash_mha_fwd_residuals/pallas_call")
    assert "TUzvUgFNTElSMjIuMC4wZ2l0AAE=" in kernel.rest
    assert list(entry.instructions)[-1] == "get-tuple-element.1"
