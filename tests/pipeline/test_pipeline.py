"""A pipeline computes what one device computes, and its arrays are sharded."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import GPT, Case, largest_error, leaves, reference
from toy_stack import Classifier

pytestmark = pytest.mark.compiles_anew

replace = dataclasses.replace
TIED = replace(GPT, tied_head=True, positions="learned", z_loss=1e-3)
BIASED = replace(GPT, norm="layer", use_bias=True, num_kv_heads=2, logit_softcap=5.0)
TOY = Classifier()
THREES = Classifier(num_layers=6)

MESHES = (
    "pipe=2",
    "pipe=4",
    "pipe=2,data=2,tensor=2",
    "pipe=2,fsdp=2,tensor=2",
    "pipe=4,fsdp=2",
)
SEQUENCE = "data+fsdp+tensor+sequence+pipeline"
ZERO1 = "data+zero1+tensor+pipeline"
TENSOR2D = "data+tensor2d+pipeline"


def row(model, remat, mesh, schedule, num_microbatches, **settings) -> Case:
    return Case(
        model=replace(model, remat=remat),
        mesh=MESHES[mesh],
        schedule=schedule,
        num_microbatches=num_microbatches,
        **settings,
    )


# Every schedule on every mesh. The cases of each schedule cover microbatches fewer
# than, equal to, more than, and not a multiple of the stages, all remat policies, and
# both gathers.
GRADIENTS = [
    row(TIED, "full", 0, "gpipe", 1),
    row(GPT, "save-named", 1, "gpipe", 6, packed=True),
    row(BIASED, "none", 2, "gpipe", 4),
    row(TIED, "save-dots", 3, "gpipe", 2),
    row(GPT, "save-named", 4, "gpipe", 8, packed=True, gather="microbatch"),
    row(GPT, "none", 0, "1f1b", 3, packed=True),
    row(TIED, "save-named", 1, "1f1b", 4),
    row(TIED, "full", 2, "1f1b", 1, plan=SEQUENCE),
    row(BIASED, "save-dots", 3, "1f1b", 6, gather="microbatch"),
    row(GPT, "save-named", 4, "1f1b", 6, packed=True),
    row(TIED, "save-dots", 0, "interleaved", 3),
    row(GPT, "full", 1, "interleaved", 2, packed=True),
    row(BIASED, "save-named", 2, "interleaved", 6),
    row(TIED, "none", 3, "interleaved", 2, plan=SEQUENCE, gather="microbatch"),
    row(GPT, "save-named", 4, "interleaved", 4, packed=True),
]
OTHERS = [
    row(TIED, "save-named", 3, "1f1b", 2, plan=TENSOR2D),
    row(TOY, "save-dots", 4, "gpipe", 3, plan=ZERO1),
    row(TOY, "none", 3, "1f1b", 4, plan=ZERO1, gather="microbatch"),
    row(TOY, "full", 3, "interleaved", 4, plan=TENSOR2D),
    row(THREES, "none", 0, "interleaved", 5, num_chunks=3, num_rows=40),
    # Enough chunks that ticks without embedding and head get their own loops.
    row(GPT, "save-named", 3, "interleaved", 4, num_chunks=4, gather="microbatch"),
]


@pytest.mark.parametrize("case", GRADIENTS + OTHERS, ids=str)
def test_gradients_equal_those_of_one_device(case):
    params, batch = case.inputs()
    sums, grads = jax.jit(case.pipeline.value_and_grad)(params, batch)
    expected_sums, expected = reference(case.model, case.num_rows, case.packed)
    assert sums.keys() == expected_sums.keys()
    for name, value in expected_sums.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)
    errors = largest_error(case.in_order(grads), expected)
    assert max(errors.values()) <= 1e-5, errors
    check_sharding(case, params, expected_specs(case.plan, stored=True))
    check_sharding(case, grads, expected_specs(case.plan, stored=False))


def expected_specs(plan: str, *, stored: bool) -> dict[str, P]:
    """Returns how arrays of the transformer and the toy must be sharded."""
    fsdp = None if plan == ZERO1 and stored else "fsdp"
    width = "pipe" if fsdp is None else ("fsdp", "pipe")
    return {
        "blocks/attention/qkv": P("pipe", fsdp, "tensor"),
        "blocks/attention/out": P("pipe", "tensor", None, fsdp),
        "blocks/mlp/up": P("pipe", fsdp, "tensor"),
        "blocks/mlp/down": P("pipe", "tensor", fsdp),
        "blocks/mlp_norm/scale": P("pipe"),
        "embedding": P("tensor", width),
        "position": P(None, width),
        "head": P(width, "tensor"),
        "final_norm/scale": P(),
        "trunk/up": P("pipe", fsdp, "tensor"),
        "trunk/bias": P("pipe", "tensor"),
        "trunk/down": P("pipe", "tensor", fsdp),
        "enter/w": P(None, width),
        "leave/w": P(width, "tensor"),
    }


def check_sharding(case: Case, tree, expected: dict[str, P]) -> None:
    """Checks the spec of each array, and the size of its local shard."""
    mesh, result = case.pipeline.mesh, leaves(tree)
    names = expected.keys() & result.keys()
    assert len(names) >= 5
    for name in names:
        x, spec = result[name], expected[name]
        wanted = NamedSharding(mesh, spec)
        assert x.sharding.is_equivalent_to(wanted, x.ndim), (name, x.sharding, spec)
        axes = [axis for entry in spec if entry for axis in np.atleast_1d(entry)]
        ways = math.prod(mesh.shape[axis] for axis in axes)
        assert x.addressable_shards[0].data.size * ways == x.size, name


def test_the_cases_cover_every_setting_for_each_schedule():
    kinds = {name: set() for name in ("gpipe", "1f1b", "interleaved")}
    for case in GRADIENTS:
        S, M = case.pipeline.schedule.num_stages, case.num_microbatches
        size = "fewer" if M < S else "equal" if M == S else "more"
        kinds[case.schedule] |= {case.mesh, case.model.remat}
        kinds[case.schedule].add("no multiple" if M > S and M % S else size)
        if "fsdp" in case.mesh:
            kinds[case.schedule].add(case.gather)
    remats = {"none", "full", "save-dots", "save-named"}
    relations = {"fewer", "equal", "more", "no multiple"}
    everything = {*MESHES, *remats, *relations, "step", "microbatch"}
    assert kinds == dict.fromkeys(kinds, everything)


def test_the_sharding_check_fails_for_replicated_arrays():
    """The check above can fail: a replicated array does not pass as sharded."""
    case = OTHERS[1]
    replicated = jax.device_put(
        case.inputs()[0], NamedSharding(case.pipeline.mesh, P())
    )
    with pytest.raises(AssertionError):
        check_sharding(case, replicated, expected_specs(case.plan, stored=True))


@pytest.mark.parametrize(
    "case",
    [
        row(TIED, "save-named", 1, "gpipe", 6),
        row(GPT, "save-named", 3, "1f1b", 3, packed=True, gather="microbatch"),
        row(BIASED, "none", 2, "interleaved", 4),
        row(THREES, "none", 0, "interleaved", 5, num_chunks=3, num_rows=40),
        row(TOY, "full", 4, "1f1b", 2, plan=ZERO1),
    ],
    ids=str,
)
def test_sums_without_gradients_equal_those_of_one_device(case):
    sums = jax.jit(case.pipeline.sums)(*case.inputs())
    expected, _ = reference(case.model, case.num_rows, case.packed)
    assert sums.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_bfloat16_is_as_accurate_as_on_one_device(gather):
    model = replace(GPT, compute_dtype="bfloat16")
    case = row(model, "save-named", 4, "1f1b", 6, packed=True, gather=gather)
    sums, grads = jax.jit(case.pipeline.value_and_grad)(*case.inputs())
    exact_sums, exact = reference(GPT, case.num_rows, case.packed)
    _, rough = reference(model, case.num_rows, case.packed)
    # Rounding has a relative error of up to 2^-9; over 304 tokens, the mean of these.
    np.testing.assert_allclose(sums["loss"], exact_sums["loss"], rtol=1e-4)
    # Every microbatch rounds its gradient; one device rounds once.
    result = largest_error(case.in_order(grads), exact)
    for name, error in largest_error(rough, exact).items():
        assert 2**-12 < error and result[name] < 2 * error, (name, result[name], error)
