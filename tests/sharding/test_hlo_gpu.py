"""Parsing HLO text of XLA for GPUs.

The programs are a gradient step of three layers (a 128 x 128 matrix, then causal
attention with 2 heads of 64 over 256 positions) on data=2,fsdp=4, compiled for H100s
with jax 0.10.2: one with cuBLAS and cuDNN, one with XLA's own kernels. Source lines and
settings of other instructions were removed.
"""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from paths import GOLDEN

from meshloom.sharding import hlo
from meshloom.sharding.audit import audit

LAYERS, L, D, H, K = 3, 256, 128, 2, 64
MATRIX = 2 * L * D * D
SCORES = 2 * H * K * L * L


def program(name: str) -> str:
    return (GOLDEN / f"{name}.hlo").read_text()


def test_flops_of_cublas_and_cudnn_are_counted():
    # One product forward and two backward; the kernels do 2 and 5 products, and the
    # mask leaves half of each.
    expected = LAYERS * (3 * MATRIX + (2 + 5) * SCORES / 2)
    assert hlo.flops(program("h100_cudnn")) == expected


def test_a_kernel_without_a_mask_counts_all_scores():
    text = program("h100_cudnn").replace('"mask_type": "CAUSAL"', '"mask_type": "NO"')
    assert hlo.flops(text) == LAYERS * (3 * MATRIX + (2 + 5) * SCORES)


def test_attention_of_unknown_size_is_an_error():
    text = program("h100_cudnn").replace("intermediate_tensor_shape", "something_else")
    with pytest.raises(ValueError, match="expected the shape of the scores"):
        hlo.flops(text)


def test_flops_of_xlas_own_kernels_are_counted():
    text = program("h100_triton")
    assert "cublas" not in text and "__triton_nested_gemm_fusion" in text
    assert hlo.flops(text) == LAYERS * (3 * MATRIX + 6 * SCORES)


@pytest.mark.parametrize("name", ["h100_cudnn", "h100_triton"])
def test_trip_counts_are_derived(name):
    text = program(name)
    bare = re.sub(r'"known_trip_count":\{[^}]*\},?', "", text)
    assert bare != text and hlo.flops(bare) == hlo.flops(text)


@pytest.mark.parametrize("name", ["h100_cudnn", "h100_triton"])
def test_asynchronous_collectives_count_once(name):
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    result = audit(program(name), mesh).by_kind_and_axes()
    weights = LAYERS * D * D * 2
    assert result == {
        ("all-gather", ("fsdp",)): (LAYERS, weights),
        ("all-reduce", ("data", "fsdp")): (LAYERS, weights),
    }
