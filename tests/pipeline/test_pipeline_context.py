"""A pipeline whose stages share the positions of a sequence between devices."""

import dataclasses

import jax
import numpy as np
import pytest
from pipelines import GPT, Case, largest_error, reference

pytestmark = pytest.mark.compiles_anew


@pytest.mark.parametrize(
    "form", ["ring", pytest.param("gather", marks=pytest.mark.slow)]
)
def test_gradients_with_sharded_positions_equal_those_of_one_device(form):
    model = dataclasses.replace(GPT, context_attention=form)
    case = Case(
        model=model,
        mesh="pipe=2,context=2",
        plan="data+fsdp+tensor+context+pipeline",
        schedule="1f1b",
        num_microbatches=2,
        num_rows=8,
        packed=True,
    )
    sums, grads = jax.jit(case.pipeline.value_and_grad)(*case.inputs())
    expected_sums, expected = reference(model, case.num_rows, True)
    np.testing.assert_allclose(sums["loss"], expected_sums["loss"], rtol=1e-6)
    errors = largest_error(case.in_order(grads), expected)
    assert max(errors.values()) <= 1e-5, errors
