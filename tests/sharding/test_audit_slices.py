"""The audit of a program over several TPU slices.

The program is a gradient step of one matrix of 4096 x 4096 in bfloat16 on data=2/2,
fsdp=4, compiled for two slices of four v5e with jax 0.10.2 and libtpu 0.0.51. Source
lines and settings were cut out.
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


def test_what_crosses_slices_counts_along_their_axis(mesh):
    found = audit(TEXT, mesh, dcn=SLICES).by_kind_and_axes()
    assert found["all-reduce", ("data",)] == (1, MATRIX // 4)
    assert found["all-gather", ("fsdp",)] == (1, MATRIX)
    # Filled up from 4096 rows to 4480, and then moved to where they belong.
    assert found["reduce-scatter", ("fsdp",)] == (1, 4480 * 4096 * 2)
    assert found["collective-permute", ("fsdp",)] == (1, 288 * 4096 * 2)
    assert len(found) == 4


def test_what_a_gather_crosses_is_whole_afterwards(mesh):
    text = TEXT.replace('transfer_type="ALL_REDUCE"', 'transfer_type="ALL_GATHER"')
    found = audit(text, mesh, dcn=SLICES).by_kind_and_axes()
    assert found["all-gather", ("data",)] == (1, 2 * MATRIX // 4)


def test_a_transfer_of_an_unknown_kind_is_an_error(mesh):
    text = TEXT.replace('transfer_type="ALL_REDUCE"', 'transfer_type="BY_PIGEON"')
    with pytest.raises(ValueError, match="does not know: BY_PIGEON; expected ALL_RED"):
        audit(text, mesh, dcn=SLICES)


def test_the_slices_must_be_those_of_the_program(mesh):
    with pytest.raises(ValueError, match="runs on 4 devices, and the mesh .* has 8;"):
        audit(TEXT, mesh)
    with pytest.raises(ValueError, match="4 devices, and the mesh .* has 2 in a slice"):
        audit(TEXT, mesh, dcn={"fsdp": 4})
    with pytest.raises(ValueError, match="the axes data, fsdp cross slices"):
        audit(TEXT, mesh, dcn={"data": 2, "fsdp": 2})
