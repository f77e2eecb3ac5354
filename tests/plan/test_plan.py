"""The closed form, on models so small that its numbers can be made by hand."""

import ast
import dataclasses
from typing import Any

import pytest
from paths import ROOT
from tiny_plans import B, D, F, L, V, config

from meshloom.sharding import MeshSpec, parse_plan
from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.links import links
from meshloom.trainer.plan.sharded import tiled_bytes
from meshloom.trainer.plan.traffic import by_axes
from meshloom.trainer.program.hardware import parse_target
from meshloom.trainer.program.state import make_layout

LAYER = 4 * D * D + 3 * D * F  # weights of a block's matrices


def parts(found, moment: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in found.memory.moments[moment]:
        total[part.name] = total.get(part.name, 0) + part.bytes
    return total


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,pipe=2"])
def test_the_state_is_what_the_layout_says(mesh):
    """On GPUs arrays are stored as they are, so bytes are those of `explain`."""
    found = forecast(config(), "h100:1x8", mesh=mesh)
    c = found.config
    tx = c.optimizer.make(lambda step: 0.0, c.model.axes())
    spec = MeshSpec.parse(mesh).abstract()
    layout = make_layout(c.model, tx, parse_plan(c.plan), spec)
    params, opt_state, batch = found.memory.state
    assert params.bytes == layout.params.bytes_per_device
    assert opt_state.bytes == layout.opt_state.bytes_per_device
    ways = 8 // (found.case.sizes["tensor"] * found.case.sizes["pipe"])
    assert batch.bytes == 3 * 4 * B * L // ways


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((16, 256), 4, 16 * 256 * 4),
        ((3, 100), 4, 8 * 128 * 4),  # both sides filled up
        ((256, 48), 4, 48 * 256 * 4),  # turned, so that nothing is
        ((12, 12, 64, 48), 4, 12 * 12 * 48 * 128 * 4),  # no side of 128
        ((12, 256), 2, 16 * 256 * 2),  # twice the rows for 16 bits
        ((768,), 4, 768 * 4),
        ((), 4, 128 * 4),
    ],
)
def test_tiles_of_a_tpu(shape, itemsize, expected):
    assert tiled_bytes(shape, itemsize) == expected


def test_flops_without_remat_are_the_models_own():
    """Of attention the model counts the causal half, a step does all of it."""
    c = config(remat="none", attention="xla")
    found = forecast(c, "v5e:2x4", mesh="fsdp=4,tensor=2")
    squares = 3 * 2 * 2 * B * L * L * D * 4 / 8  # passes, products, FLOPs; 4 layers
    assert found.flops.executed == found.flops.model + squares / 2


@pytest.mark.parametrize(
    ("remat", "kernels"), [("none", 2 + 5), ("save-named", 4 + 5), ("save-dots", 4 + 5)]
)
def test_flops_of_attention_as_a_kernel(remat, kernels):
    """Half of each product; backward makes the scores again: one more than autodiff."""
    found = forecast(config(remat=remat), "h100:1x8", mesh="fsdp=8")
    tokens = B * L / 8
    layer = 2 * tokens * 3 * LAYER + kernels * 2 * tokens * L * D / 2
    assert found.flops.executed == 4 * layer + 3 * 2 * tokens * D * V


@pytest.mark.parametrize(
    ("remat", "weights", "squares"),
    [("none", 3, 3), ("save-named", 3, 3.5), ("save-dots", 3, 4), ("full", 4, 4)],
)
def test_flops_of_what_is_recomputed(remat, weights, squares):
    found = forecast(config(remat=remat, attention="xla"), "v5e:2x4", mesh="fsdp=8")
    tokens = B * L / 8
    down = D * F if remat == "full" else 0  # nobody needs its result again
    layer = 2 * tokens * (weights * LAYER - down) + squares * 4 * tokens * L * D
    assert found.flops.executed == 4 * layer + 3 * 2 * tokens * D * V


def test_flops_of_a_pipeline_count_bubbles():
    """1f1b, 2 stages, 4 microbatches: 5 ticks with forwards, 5 with backwards."""
    c = config(remat="full", num_microbatches=4, attention="xla")
    found = forecast(c, "v5e:2x4", mesh="pipe=2,fsdp=4")
    tokens = B * L / 4 / 4
    forward = 2 * (2 * tokens * LAYER + 4 * tokens * L * D)
    backward = 4 * forward - 2 * 2 * tokens * D * F
    head = 4 * 3 * 2 * tokens * D * V / 2
    assert found.flops.executed == 5 * (forward + backward) + head


def test_memory_of_what_blocks_keep():
    found = forecast(config(remat="full"), "h100:1x8", mesh="fsdp=8")
    token = B * L // 8 * 2
    at_head = parts(found, "head")
    assert at_head["kept"] == 4 * token * D
    assert at_head["logits"] == 2 * token * V
    named = forecast(config(remat="save-named"), "h100:1x8", mesh="fsdp=8")
    assert parts(named, "head")["kept"] == 4 * token * (D + 3 * D + D + D + 2 * F)
    tpu = forecast(config(remat="full"), "v5e:2x4", mesh="data=4,fsdp=2")
    backward = parts(tpu, "backward")
    norms = 2 * 8 * D  # 4 layers in a tile of 8 rows
    assert backward["gradients"] == 4 * ((4 * LAYER + D * V) // 2 + norms)
    assert backward["weights, gathered"] == 2 * LAYER
    assert backward["weights, cast"] == 2 * 4 * LAYER // 2


def test_on_gpus_other_things_wait_through_the_backward_pass():
    found = forecast(config(remat="full"), "h100:1x8", mesh="fsdp=8")
    token, backward = B * L // 8 * 2, parts(found, "backward")
    assert "weights, cast" not in backward
    # Matrices that are sharded along their last dimension: out and down.
    assert backward["weights, transposed"] == 4 * 4 * (D * D + D * F) // 8
    assert backward["logits"] == token * (V + D)
    assert backward["gradients"] == 4 * 4 * LAYER // 8 + 4 * 2 * 4 * D
    assert backward["workspace"] == 32 * 2**20
    kept = forecast(config(remat="none"), "h100:1x8", mesh="fsdp=8")
    assert parts(kept, "backward")["weights, transposed"] == 0


def test_scores_are_stored_where_attention_is_no_kernel():
    tpu, gpu, plain = (
        forecast(config(**more), name, mesh="fsdp=8")
        for name, more in (
            ("v5e:2x4", {"attention": "xla"}),
            ("h100:1x8", {}),
            ("h100:1x8", {"attention": "xla"}),
        )
    )
    names = [
        {a.name for a in found.case.costs.working[0].arrays} for found in (tpu, gpu)
    ]
    assert names[0] - names[1] == {"scores, float32"}
    rows = B // 8
    scores = 2 * 4 * rows * 4 * L * L
    for found in (tpu, plain):
        expected = scores + 2 * rows * L * D * (6 + 1)
        assert parts(found, "backward")["working"] == expected
    # The hidden layer's gradient, its result, and the gradients of qkv.
    assert parts(gpu, "backward")["working"] == 2 * rows * L * (2 * F + F + 3 * D)
    again = forecast(config(remat="full"), "h100:1x8", mesh="fsdp=8")
    whole = 2 * rows * L * (4 * F + F + 3 * D + D)
    assert parts(again, "backward")["working"] == whole


def test_the_gradient_of_logits_is_stored_where_a_loop_reads_it():
    """The ring of the head's gradient is a loop from 8 devices on."""
    for mesh, count in (("fsdp=8", 2), ("fsdp=4,tensor=2", 1), ("data=2,fsdp=4", 1)):
        found = forecast(config(), "v5e:2x4", mesh=mesh)
        ways = 8 if "tensor" not in mesh else 4 * 2
        assert parts(found, "head")["logits"] == count * 2 * B * L * V // ways


def test_over_slices_logits_wait_through_the_backward_pass():
    one = forecast(config(), "v5e:2x4", mesh="data=2,fsdp=4")
    two = forecast(config(), "2xv5e:2x2", mesh="data=2/2,fsdp=4")
    assert "logits" not in parts(one, "backward")
    assert parts(two, "backward")["logits"] == 2 * B * L * V // 8


@pytest.mark.parametrize(
    ("remat", "heads", "mesh", "expected"),
    [
        ("save-named", 4, "fsdp=8", 8),  # two in float32
        ("save-named", 2, "fsdp=8", 6),  # shared keys: one, and one as multiplied
        ("save-dots", 4, "fsdp=8", 10),  # and one more that waits
        ("full", 4, "fsdp=8", 8),
        ("full", 4, "fsdp=4,tensor=2", 10),  # it waits where heads are sharded
    ],
)
def test_scores_that_are_stored_at_once(remat, heads, mesh, expected):
    # Of a small hidden layer, so that the MLP needs less.
    c = config(remat=remat, num_kv_heads=heads, d_ff=128, attention="xla")
    found = forecast(c, "v5e:2x4", mesh=mesh)
    ways = found.case.sizes["tensor"]
    rows = B // found.case.sizes["fsdp"]
    groups = 2 * 2 * rows * L * (D + 2 * heads * 64) + 2 * rows * L * D
    scores = rows * 4 * L * L * expected
    assert parts(found, "backward")["working"] == (scores + groups) // ways


def test_memory_of_a_pipeline_is_of_its_stage():
    c = config(remat="full", num_microbatches=4)
    tpu, gpu = (
        parts(forecast(c, name, mesh="pipe=2,fsdp=4"), "backward")
        for name in ("v5e:2x4", "h100:1x8")
    )
    stage, outside = 2 * (LAYER + 2 * D), 2 * D * V + D
    activation = 2 * B * L * D // 4 // 4
    for found in (tpu, gpu):
        assert found["kept"] == 2 * activation
        assert found["residual stream"] == 4 * activation
    # The scales of norms fill tiles on TPUs.
    assert tpu["gradient sums"] == pytest.approx(4 * (stage + outside), rel=0.02)
    assert tpu["weights, gathered"] == pytest.approx(2 * (stage + outside), rel=0.02)
    assert tpu["gradients"] == pytest.approx(2 * stage, rel=0.02)
    assert gpu["gradient sums"] == 4 * (stage + outside)
    assert gpu["weights, gathered"] == 2 * (stage + outside)
    # Look-ups are summed in float32.
    assert gpu["gradients"] == 2 * (stage + outside) + 4 * D * V
    # On GPUs all but the head are then copied, turned.
    assert gpu["weights, transposed"] == 2 * (2 * LAYER + D * V)


def test_memory_of_a_pipeline_does_not_grow_with_microbatches():
    def peak(num, batch):
        c = config(remat="full", num_microbatches=num)
        return forecast(c, "h100:1x8", mesh="pipe=4,fsdp=2", batch=batch).memory

    few, many = peak(8, 64), peak(32, 256)
    assert few.temporaries == many.temporaries
    in_flight = [p for p in few.parts if p.name == "in flight"]
    assert in_flight[0].bytes == 7 * (64 // 2 // 8) * L * D * 2  # 2S - 1 inputs


def test_gradient_sums_are_there_with_several_microbatches():
    one, two = (
        forecast(config(num_microbatches=num), "h100:1x8", mesh="fsdp=8")
        for num in (1, 2)
    )
    params = one.memory.state[0].bytes
    assert "gradient sums" not in parts(one, "backward")
    assert parts(two, "backward")["gradient sums"] == params


def test_traffic_of_fsdp():
    found = forecast(config(remat="full"), "h100:1x8", mesh="fsdp=8")
    by = {(t.kind, t.what): t.bytes for t in found.transfers}
    whole = 2 * (4 * LAYER + 2 * D * V)
    assert by["all-gather", "weights"] == whole + 2 * 4 * LAYER  # blocks once more
    assert by["reduce-scatter", "gradients"] == 2 * (4 * LAYER + D * V)
    assert by["all-to-all", "gradients"] == 2 * B * L * D // 8


def test_gpus_gather_an_embedding_that_is_the_head_twice():
    tied = config(remat="full", tied_head=True)
    gpu, tpu = (
        sum(
            t.bytes
            for t in forecast(tied, name, mesh=mesh).transfers
            if t.what == "weights"
        )
        for name, mesh in (("h100:1x8", "fsdp=8"), ("v5e:2x4", "fsdp=8"))
    )
    assert gpu - tpu == 2 * D * V


def test_an_embedding_that_is_the_head_has_two_gradients_to_sum():
    """As the head in the type of computing, of its look-ups in float32."""
    tied = forecast(config(tied_head=True), "h100:1x8", mesh="data=2,fsdp=4")
    assert by_axes(tied.transfers)["data",] == (2 * 4 * LAYER + (2 + 4) * D * V) // 4


def test_on_tpus_the_scatter_is_a_ring_of_one_more():
    gpu, tpu = (
        forecast(config(), name, mesh="fsdp=8") for name in ("h100:1x8", "v5e:2x4")
    )
    (scatter,) = (t for t in gpu.transfers if t.kind == "reduce-scatter")
    (ring,) = (t for t in tpu.transfers if t.kind == "collective-permute")
    assert ring.bytes == scatter.bytes * 9 // 8
    # Over all of a v5p with rings an all-reduce takes its place; not over a part, and
    # not where there are none.
    whole, part, lines = (
        {t.kind for t in forecast(config(), name, mesh=mesh).transfers}
        for name, mesh in (
            ("v5p-128", "fsdp=64"),
            ("v5p-128", "fsdp=32,tensor=2"),
            ("v5p-16", "fsdp=8"),
        )
    )
    assert "collective-permute" not in whole
    assert "collective-permute" in part & lines


def test_traffic_of_tensor_parallelism():
    """Two sums forward and two backward a block, one more where out is done again."""
    stream = 2 * B * L * D // 4
    for remat, sums in (("save-named", 4), ("full", 5)):
        found = forecast(config(remat=remat), "h100:1x8", mesh="fsdp=4,tensor=2")
        assert by_axes(found.transfers)["tensor",] == stream * (4 * sums + 2)


def test_traffic_of_a_pipeline():
    c = config(remat="full", num_microbatches=4)
    found = forecast(c, "h100:1x8", mesh="pipe=2,fsdp=4")
    activation = 2 * B * L * D // 4 // 4
    (ring,) = (t for t in found.transfers if t.what == "stages")
    assert ring.bytes == 10 * activation
    gathered = [t for t in found.transfers if t.kind == "all-gather"]
    by = {t.axes: t.bytes for t in gathered}
    assert by["fsdp",] == 2 * (2 * LAYER + 2 * D * V)
    # Two ticks that only bring embeddings, four that go both ways, two that only bring
    # gradients back: 2 + 4 * 2 + 2 exchanges.
    (outside,) = (t for t in found.transfers if t.what == "outside")
    assert outside.bytes == 12 * activation
    assert all(t.axes == ("pipe", "fsdp") for t in found.transfers if len(t.axes) > 1)


def test_links_take_neighbours_first():
    found = forecast(config(), "v5p-128", mesh="fsdp=16,tensor=4", batch=64)
    by = links(found.target, found.case.sizes)
    one = parse_target("v5p-128").device.link
    assert by["tensor"].bandwidth == 2 * one  # one dimension of 4, closed to a ring
    assert by["fsdp"].bandwidth == 4 * one
    nodes = forecast(config(), "h100:2x8", mesh="fsdp=4,tensor=4")
    nodes = links(nodes.target, nodes.case.sizes)
    assert (nodes["tensor"].near, nodes["tensor"].far) == (4, 1)
    assert (nodes["fsdp"].near, nodes["fsdp"].far) == (2, 2)


def test_a_slower_network_takes_longer():
    one = forecast(config(), "v5e:2x4", mesh="data=2,fsdp=4")
    two = forecast(config(), "2xv5e:2x2", mesh="data=2/2,fsdp=4")
    assert two.roofline.network["data"] > one.roofline.network["data"]
    assert two.roofline.compute == one.roofline.compute
    assert one.roofline.overlapped <= one.roofline.serial


def test_slices_must_be_planned():
    with pytest.raises(ValueError, match="split over 1 slices .* 2xv5e:2x2 has 2"):
        forecast(config(), "2xv5e:2x2", mesh="fsdp=8")
    with pytest.raises(ValueError, match="v5e:2x4 is one slice. Leave out the part"):
        forecast(config(), "v5e:2x4", mesh="data=2/2,fsdp=4")


def test_a_config_is_checked_as_a_run_would():
    with pytest.raises(ValueError, match="batch_size 12.*cannot be sharded 8 ways"):
        forecast(config(), "v5e:2x4", mesh="fsdp=8", batch=12)
    with pytest.raises(ValueError, match="needs 4 devices, but there are 8"):
        forecast(config(), "v5e:2x4", mesh="fsdp=4")
    with pytest.raises(ValueError, match="64 is not divisible by num_microbatches 3"):
        forecast(config(num_microbatches=3), "v5e:2x4", mesh="fsdp=8")
    with pytest.raises(ValueError, match="object has no method `costs`"):
        forecast(dataclasses.replace(config(), model=object()), "v5e:2x4")


def test_a_forecast_knows_no_array_of_a_model():
    """They are in the model's costs; selectors and parts are the forecast's own."""
    model: Any = config().model
    costs = model.costs(B, L, platform="cpu")
    paths = list(forecast(config(), "v5e-8").case.sharded.weights)
    arrays = [
        *costs.kept,
        *costs.kept_once,
        *(a for w in costs.working for a in w.arrays),
    ]
    names = {path.rpartition("/")[2] for path in paths} | {*paths, costs.stack}
    names |= {one.name for one in (*arrays, *costs.products)}
    names |= {"embed", "heads", "kv_heads", "mlp", "vocab"}
    used = {
        node.value
        for path in (ROOT / "trainer/plan").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {"qkv", "embedding", "blocks/", "scores"} <= names
    # A part of every model, ticks of a pipeline, hidden seconds, an anchor of SVG.
    assert used & names <= {"head", "heads", "hidden", "middle"}
