"""What a stage computes without a microbatch changes no result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pipelines import GPT, Case
from toy_stack import Classifier

from meshloom.sharding.pipeline import chunks, loops, ticks

pytestmark = pytest.mark.compiles_anew

TOY = Classifier()
# More microbatches than stages, and not a multiple: bubbles of every kind.
CASES = {
    name: Case(model=model, mesh="pipe=2", schedule=name, num_microbatches=3)
    for name, model in (
        ("gpipe", TOY),
        ("1f1b", dataclasses.replace(TOY, remat="none")),
        ("interleaved", TOY),
    )
}
CASES["transformer"] = Case(
    model=GPT,
    mesh="pipe=2,fsdp=2",
    schedule="1f1b",
    num_microbatches=3,
    gather="microbatch",
    packed=True,
)


def run(case: Case, method: str = "value_and_grad"):
    return jax.device_get(jax.jit(getattr(case.pipeline, method))(*case.inputs()))


def with_nan(case: Case) -> Case:
    return dataclasses.replace(case, bubble=float("nan"))


def num_nan(tree) -> int:
    return sum(int(np.isnan(leaf).sum()) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["value_and_grad", "sums"])
def test_nan_in_every_bubble_changes_no_result(name, method):
    expected, result = run(CASES[name], method), run(with_nan(CASES[name]), method)
    assert num_nan(expected) == 0
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def add(total, new, is_real):
    return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, new)


def add_chunk(self, grads, chunk, grad, is_real):
    return add(grads, grad, is_real)


def write(kept, new, slot, is_real):
    slot = jnp.maximum(slot, 0)
    return jax.tree.map(
        lambda k, x: lax.dynamic_update_index_in_dim(k, x, slot, 0), kept, new
    )


# Functions that mask bubbles, replaced by ones that do not; where NaN must show.
LEAKS = {
    "sums and weights outside": (ticks, "_add", add),
    "weights of the blocks": (chunks.Chunks, "add", add_chunk),
    "what waits for a backward": (ticks, "_write", write),
}


@pytest.mark.parametrize("what", LEAKS)
def test_without_a_mask_the_nan_comes_through(monkeypatch, what):
    """The test above can fail: without a mask, the same NaN comes through."""
    monkeypatch.setattr(*LEAKS[what])
    sums, grads = run(with_nan(CASES["gpipe"]))
    outside = num_nan((sums, grads["enter"], grads["leave"]))
    blocks = num_nan(grads["trunk"])
    if what == "sums and weights outside":
        assert outside and not blocks
    elif what == "weights of the blocks":
        assert blocks and not outside
    else:
        assert blocks


def test_without_a_mask_the_nan_comes_through_in_evaluation(monkeypatch):
    """A head one tick early reads the last stage's output of a bubble."""

    def early(schedule, *, training):
        result = rows(schedule, training=training)
        return result._replace(head=np.roll(result.head, -1))

    rows, case = loops.rows, with_nan(CASES["gpipe"])
    monkeypatch.setattr(loops, "rows", early)
    assert num_nan(run(case, "sums"))
