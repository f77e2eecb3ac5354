"""The collectives of a pipeline: activations once, weights, and nothing else."""

import collections
import dataclasses

import jax
import jax.extend
import pytest
from pipelines import GPT, LENGTH, Case, leaves
from toy_stack import Classifier

from meshloom.sharding import Sharder, audit
from meshloom.sharding.audit import Audit
from meshloom.sharding.pipeline import simulate
from meshloom.sharding.pipeline.loops import loops, rows

pytestmark = pytest.mark.compiles_anew

TOY = Classifier(num_layers=16)
FLOAT = 4
SUMS = 4 * FLOAT  # loss, weight, right, size


def toy(mesh, schedule, num_microbatches, **settings) -> Case:
    return Case(
        model=TOY,
        mesh=mesh,
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_rows=96,
        **settings,
    )


def audited(case: Case) -> Audit:
    return audit(case.compile(), case.pipeline.mesh)


def sizes(case: Case) -> tuple[int, int, int, int]:
    shape = case.pipeline.mesh.shape
    return shape["pipe"], shape["data"], shape["fsdp"], shape["tensor"]


def weight_bytes(model) -> dict[str, int]:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return {name: leaf.size * FLOAT for name, leaf in leaves(shapes).items()}


def activation_bytes(case: Case, elements: int) -> int:
    """Returns the bytes of one microbatch on one device, between two blocks."""
    _, data, fsdp, _ = sizes(case)
    return case.num_rows // (case.num_microbatches * data * fsdp) * elements * FLOAT


def transfers(case: Case) -> dict[tuple[str, tuple[str, ...]], int]:
    """Counts the transfers of activations over the pipe axis."""
    counts = collections.Counter()
    for loop in loops(rows(case.pipeline.schedule, training=True)):
        for kind, length in loop.runs:
            num = loop.times * length
            counts["collective-permute"] += num * (kind.forward + kind.backward)
            to_parts = kind.head or kind.embed_backward
            to_full = kind.head or kind.embed
            counts["all-to-all"] += num * (to_parts + to_full)
    return {(kind, ("pipe",)): count for kind, count in counts.items()}


@pytest.mark.parametrize(
    "case",
    [
        toy("pipe=4", "gpipe", 8),
        toy("pipe=4,fsdp=2", "1f1b", 6),
        toy("pipe=2,data=2,tensor=2", "interleaved", 6),
    ],
    ids=str,
)
def test_every_byte_that_moves_is_accounted_for(case):
    """Activations move over pipe as scheduled, gradients and weights once per step.

    No stage gathers the weights of another, and no activation is gathered.
    """
    S, data, fsdp, tensor = sizes(case)
    w = weight_bytes(TOY)
    matrices = (w["trunk/up"] + w["trunk/down"]) // S // tensor
    bias = w["trunk/bias"] // S // tensor
    outside = w["enter/w"] + w["enter/bias"] + w["leave/w"] // tensor
    replicated = w["leave/bias"] // tensor + SUMS
    expected = {
        key: (count, count * activation_bytes(case, TOY.width))
        for key, count in transfers(case).items()
    }
    bytes_of_weights = {
        ("all-gather", ("pipe",)): outside // fsdp,
        ("reduce-scatter", ("pipe",)): outside // fsdp,
    }
    if data == fsdp == 1:
        bytes_of_weights["all-reduce", ("pipe",)] = replicated
    elif fsdp > 1:
        bytes_of_weights |= {
            ("all-gather", ("fsdp",)): matrices + outside,
            ("reduce-scatter", ("fsdp",)): matrices + outside,
            ("all-reduce", ("fsdp",)): bias,
            ("all-reduce", ("pipe", "fsdp")): replicated,
        }
    else:
        bytes_of_weights |= {
            ("all-reduce", ("data",)): matrices + bias + outside // S,
            ("all-reduce", ("pipe", "data")): replicated,
        }
    result = {
        key: total
        for key, total in audited(case).by_kind_and_axes().items()
        if key[1] != ("tensor",)
    }
    moved = {key: result.pop(key, None) for key in expected}
    assert moved == expected
    assert {key: total for key, (_, total) in result.items()} == bytes_of_weights


@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_matrices_are_communicated_in_the_compute_dtype(gather, monkeypatch):
    # XLA for CPU aborts on reduce-scatters in bfloat16, so float32 is used there.
    monkeypatch.setattr(Sharder, "platform", "tpu")
    case = Case(
        model=dataclasses.replace(GPT, compute_dtype="bfloat16", attention="xla"),
        mesh="pipe=2,fsdp=2",
        schedule="1f1b",
        num_microbatches=4,
        gather=gather,
    )
    traced = jax.make_jaxpr(case.pipeline.value_and_grad)(*case.inputs())
    result = {
        (eqn.primitive.name, str(eqn.outvars[0].aval.dtype))
        for eqn in equations(traced.jaxpr)
        if eqn.params.get("axis_name") in ("fsdp", ("fsdp",))
    }
    # Sums over all microbatches are reduce-scattered in float32.
    scattered = "float32" if gather == "step" else "bfloat16"
    assert result == {("all_gather", "bfloat16"), ("reduce_scatter", scattered)}


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.parametrize("remat", ["save-dots", "none"])
def test_weights_can_be_gathered_per_microbatch(remat):
    model = Classifier(num_layers=16, remat=remat)
    case = Case(
        model=model,
        mesh="pipe=4,fsdp=2",
        schedule="1f1b",
        num_microbatches=6,
        num_rows=96,
        gather="microbatch",
    )
    sim = simulate(case.pipeline.schedule, remat=remat, gather="microbatch")
    w = weight_bytes(model)
    stage = (w["trunk/up"] + w["trunk/down"]) // 4
    result = [c for c in audited(case).collectives if c.axes == ("fsdp",)]
    for kind, expected in (
        ("all-gather", sim.weight_gathers),
        ("reduce-scatter", sim.weight_scatters),
    ):
        # One layer at a time; weights outside the stack have other shapes.
        layers = [
            c for c in result if c.kind == kind and c.shape in ((16, 24), (24, 16))
        ]
        assert sum(c.bytes for c in layers) == expected * stage
        assert sum(c.count for c in layers) == expected * 2 * 16 / 4


def gpt(plan: str) -> Case:
    return Case(
        model=GPT,
        mesh="pipe=2,fsdp=2,tensor=2",
        schedule="1f1b",
        num_microbatches=6,
        plan=plan,
    )


def test_a_transformer_gathers_weights_once_and_no_activation():
    case = gpt("data+fsdp+tensor+pipeline")
    result = audited(case)
    w = weight_bytes(GPT)
    blocks = sum(size for name, size in w.items() if name.split("/")[-1] != "scale")
    tables = w["embedding"] + w["head"]
    gathers = [c for c in result.collectives if c.kind == "all-gather"]
    assert {c.axes for c in gathers} == {("fsdp",), ("pipe",)}
    # Gathers in a loop would run for every microbatch.
    assert {c.count for c in gathers} == {1}
    assert result.total("all-gather", "fsdp")[1] == (blocks - tables) // 4 + tables // 2
    assert result.total("all-gather", "pipe")[1] == tables // 4
    size = activation_bytes(case, LENGTH * GPT.d_model)
    count, moved = result.total("collective-permute", "pipe")
    # The last gradient of stage 0's input is not sent.
    assert (count, moved) == (13, 13 * size)


def test_a_sharded_residual_stream_is_sent_sharded():
    case = gpt("data+fsdp+tensor+sequence+pipeline")
    result = audited(case).collectives
    half = activation_bytes(case, LENGTH * GPT.d_model) // 2
    moved = [c for c in result if c.kind in ("collective-permute", "all-to-all")]
    assert {(c.axes, c.bytes // c.count) for c in moved} == {(("pipe",), half)}
    # A sequence is gathered only inside the model, never for an exchange.
    gathers = [c for c in result if c.kind == "all-gather" and c.axes == ("tensor",)]
    assert gathers and all("/models/" in c.source for c in gathers)
