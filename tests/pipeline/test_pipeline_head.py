"""A pipeline with its head in blocks computes what one device computes at once."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from pipelines import GPT, LENGTH, Case, largest_error, reference

pytestmark = pytest.mark.compiles_anew

replace = dataclasses.replace
SMALL = replace(GPT, num_layers=2, vocab_size=250, z_loss=1e-3, logit_softcap=5.0)
ROWS, BLOCK = 48, 5


def case(model, mesh: str, **settings) -> Case:
    return Case(
        model=replace(model, head_block=BLOCK),
        mesh=mesh,
        schedule="1f1b",
        num_microbatches=3,
        num_rows=ROWS,
        **settings,
    )


@pytest.mark.parametrize(
    "found",
    [
        case(SMALL, "pipe=2,fsdp=2,tensor=2", gather="microbatch"),
        case(replace(SMALL, tied_head=True), "pipe=2,data=2", bubble=float("nan")),
    ],
    ids=str,
)
def test_sums_and_gradients_are_those_of_one_device(found):
    whole = replace(found.model, head_block=0)
    sums, grads = reference(whole, ROWS)
    program = found.compile()
    mine, gradients = program(*found.inputs())
    assert max(largest_error(jax.device_get(mine), sums).values()) <= 1e-6
    errors = largest_error(found.in_order(gradients), grads)
    assert max(errors.values()) <= 1e-5, errors
    shape = dict(found.pipeline.mesh.shape)
    rows = ROWS // 3 // shape["fsdp"] // shape["data"]
    logits = rows * LENGTH // 2 * found.model.padded_vocab // shape["tensor"]
    text = program.as_text()
    sizes = {
        int(np.prod([int(n) for n in dims.split(",")]))
        for dims in re.findall(r"\bf32\[([\d,]+)\]", text)
    }
    assert logits not in sizes
