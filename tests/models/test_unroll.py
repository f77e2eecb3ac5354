"""Unrolled layers."""

import dataclasses

import numpy as np
from test_transformer import (
    LLAMA,
    assert_trees_close,
    grad_of,
    random_batch,
    random_params,
)


def test_unrolling_changes_no_result_and_leaves_no_loop():
    params, batch = random_params(LLAMA), random_batch(LLAMA)
    loss, grads = grad_of(LLAMA, params, batch)
    assert "while" in grad_of.lower(LLAMA, params, batch).as_text()
    for unroll in (2, 3):  # all layers, and more than there are
        config = dataclasses.replace(LLAMA, unroll=unroll)
        result = grad_of(config, params, batch)
        np.testing.assert_allclose(result[0], loss, rtol=1e-6)
        assert_trees_close(result[1], grads, rtol=1e-6)
        assert "while" not in grad_of.lower(config, params, batch).as_text()
