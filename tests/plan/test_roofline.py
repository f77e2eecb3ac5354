"""What of a plan's traffic is hidden, and what passes through memory."""

import pytest
from tiny_plans import B, D, F, L, V, config

from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.fitted import GPU
from meshloom.trainer.plan.roofline import memory_seconds

QKV, LAYER = 3 * D * D, 4 * D * D + 3 * D * F
LAYERS = 4


def transfer(found, kind, what):
    (one,) = (t for t in found.transfers if (t.kind, t.what) == (kind, what))
    return one


def test_on_v5e_gathers_after_the_first_and_rings_are_hidden():
    found = forecast(config(remat="full"), "v5e:2x4", mesh="fsdp=8", batch=512)
    line, link = found.roofline, 50e9
    gather = transfer(found, "all-gather", "weights")
    ring = transfer(found, "collective-permute", "gradients")
    # Lines of 2 and 4: two links. A ring sends half each way, over one.
    gathered = gather.bytes * 7 / 8 / (2 * link)
    later = 2 * LAYERS * (LAYER - QKV)
    share = later / (2 * LAYERS * LAYER + 2 * D * V)
    hidden = line.network["fsdp"] - line.exposed["fsdp"]
    # Scales of norms, which are not gathered, are counted among the weights.
    assert hidden == pytest.approx(share * gathered + ring.bytes / 2 / link, rel=0.02)
    assert line.step == pytest.approx(line.serial - hidden)


@pytest.mark.parametrize("target", ["v5p:4x4x4", "v6e:8x8"])
def test_on_other_tpus_gathers_are_waited_for(target):
    found = forecast(config(remat="full"), target, mesh="fsdp=16,tensor=4")
    line = found.roofline
    ring = transfer(found, "collective-permute", "gradients")
    hidden = line.network["fsdp"] - line.exposed["fsdp"]
    assert hidden == pytest.approx(ring.bytes / 2 / 100e9)
    assert line.exposed["tensor"] == line.network["tensor"]


def test_no_more_is_hidden_than_there_is_to_hide_behind():
    slow = "own:1x8,flops=4e14,hbm=64e9,hbm_bandwidth=2e12,link=1e9,network=1e9"
    line = forecast(config(), slow, mesh="fsdp=8", batch=8).roofline
    assert line.serial - line.step == pytest.approx(line.compute + line.memory)


def test_scores_that_are_stored_pass_through_memory():
    stored, fused = (
        memory_seconds(forecast(c, "v5e:2x4", mesh="fsdp=8").case)
        for c in (config(attention=kind, num_heads=2) for kind in ("xla", "splash"))
    )
    scores = 4 * (B // 8) * 2 * L * L  # float32, 2 heads
    # Two arrays alive, each 7 times; their products take a part of that time.
    products = 2 * 3 * 2 * 2 * (B // 8) * L * L * D / 2 * (819e9 / 197e12)
    # The kernel stores gradients of queries, and sums over keys for 8 rows, twice.
    kernel = 2 * (B // 8) * L * D + 2 * 4 * (B // 8) * 2 * 8 * L
    assert (stored - fused) * 819e9 == pytest.approx(
        LAYERS * (14 * scores - products - 2 * kernel), rel=0.05
    )


def test_a_larger_batch_passes_more_of_the_stream():
    one, two = (
        forecast(config(), "h100:1x8", mesh="fsdp=8", batch=n) for n in (64, 128)
    )
    more = (memory_seconds(two.case) - memory_seconds(one.case)) * 3.35e12
    working, kept = 7 * D + 5 * F, 6 * D + 2 * F
    block = GPU.stream_passes * D + GPU.working_passes * working + 2 * kept
    assert more == pytest.approx(2 * 8 * L * (LAYERS * block + 3 * V))


def test_a_stage_adds_up_its_gradients_at_every_tick():
    few, many = (
        forecast(config(num_microbatches=n), "h100:1x8", mesh="pipe=2,fsdp=4")
        for n in (4, 8)
    )
    ticks = 4  # four more
    stage = 4 * 2 * LAYER
    more = (memory_seconds(many.case) - memory_seconds(few.case)) * 3.35e12
    assert more > ticks * 7 * stage
