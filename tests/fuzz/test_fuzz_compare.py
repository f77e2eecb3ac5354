"""What is rounding and what is an error, where the sum of terms is close to 0."""

import fuzz_check
import jax
import numpy as np
import pytest
from fuzz_cases import Case
from fuzz_compare import close_states, tolerance
from fuzz_models import batches, make_model

CASE = Case(
    family="classifier",
    model={"num_layers": 1, "width": 4, "num_hidden": 4, "num_classes": 2},
)
# The momentum of a bias is 0.9 * itself + 0.1 * the gradient; of this size are both.
TERM = 1e-2


@pytest.fixture(scope="module")
def cancelled():
    """A state, and its next, in which the momentum of a bias cancels to 1e-3 of it."""
    one = fuzz_check.reference(CASE)
    first, (batch,) = one.begin(), batches(CASE, make_model(CASE), 0, 1)
    grads = one.step(first, batch).state.opt_state[0].mu["leave"]["bias"]
    scale = TERM / np.linalg.norm(grads)
    assert 0.01 < scale < 100
    first = _moved(first, lambda x: x - (1 - 1e-3) * grads / 0.9)
    return first, one.step(first, batch)


def _moved(state, change):
    def one(path, x):
        is_it = ".mu['leave']['bias']" in jax.tree_util.keystr(path)
        return change(x) if is_it else x

    return jax.tree_util.tree_map_with_path(one, state)


def test_a_sum_that_cancels_is_judged_by_its_terms(cancelled):
    first, wanted = cancelled
    norm = np.linalg.norm(wanted.state.opt_state[0].mu["leave"]["bias"])
    assert norm < 0.01 * TERM
    rounding = np.float32(2**-23 * TERM)
    assert rounding > tolerance(CASE).sums * norm / 10
    found = _moved(wanted.state, lambda x: x + 4 * rounding * np.array([1, -1], "f"))
    close_states(found, first, wanted, tolerance(CASE), "step 0")


@pytest.mark.parametrize("error", [1e-5, 1e-3])
def test_an_error_of_the_terms_is_found(cancelled, error):
    first, wanted = cancelled
    found = _moved(wanted.state, lambda x: x + np.float32(error * TERM))
    with pytest.raises(AssertionError, match=r"mu\['leave'\]\['bias'\] is off by"):
        close_states(found, first, wanted, tolerance(CASE), "step 0")
