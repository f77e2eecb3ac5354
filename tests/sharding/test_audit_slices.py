"""The audit of a program over several TPU slices.

The program is a gradient step of a 4096 x 4096 matrix in bfloat16 on data=2/2,fsdp=4,
compiled for two slices of four v5e chips with jax 0.10.2 and libtpu 0.0.51. Source
lines and settings were removed.
"""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from paths import GOLDEN

from meshloom.sharding.audit import audit

TEXT = (GOLDEN / "v5e_two_slices.hlo").read_text()
SLICES = {"data": 2}
MATRIX = 4096 * 4096 * 2


@pytest.fixture
def mesh():
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def test_a_transfer_between_slices_counts_for_their_axis(mesh):
    result = audit(TEXT, mesh, dcn=SLICES).by_kind_and_axes()
    assert result["all-reduce", ("data",)] == (1, MATRIX // 4)
    assert result["all-gather", ("fsdp",)] == (1, MATRIX)
    # Padded from 4096 rows to 4480, and then permuted into place.
    assert result["reduce-scatter", ("fsdp",)] == (1, 4480 * 4096 * 2)
    assert result["collective-permute", ("fsdp",)] == (1, 288 * 4096 * 2)
    assert len(result) == 4


def test_the_payload_of_a_gather_between_slices_is_its_result(mesh):
    text = TEXT.replace('transfer_type="ALL_REDUCE"', 'transfer_type="ALL_GATHER"')
    result = audit(text, mesh, dcn=SLICES).by_kind_and_axes()
    assert result["all-gather", ("data",)] == (1, 2 * MATRIX // 4)


def test_a_transfer_of_an_unknown_kind_is_an_error(mesh):
    text = TEXT.replace('transfer_type="ALL_REDUCE"', 'transfer_type="BY_PIGEON"')
    with pytest.raises(
        ValueError, match="to other slices, BY_PIGEON; expected ALL_RED"
    ):
        audit(text, mesh, dcn=SLICES)


def test_the_number_of_slices_must_match_the_program(mesh):
    with pytest.raises(ValueError, match="runs on 4 devices, but the mesh .* has 8;"):
        audit(TEXT, mesh)
    with pytest.raises(ValueError, match="4 devices, but the mesh .* has 2 in a slice"):
        audit(TEXT, mesh, dcn={"fsdp": 4})
    with pytest.raises(ValueError, match="the axes data, fsdp cross slices"):
        audit(TEXT, mesh, dcn={"data": 2, "fsdp": 2})
