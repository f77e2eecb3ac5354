"""Tests that a dry run rejects all data that a run would reject."""

import jax
import npz_rows
import numpy as np
import pytest

from meshloom.trainer.run.prepare import prepare


def prepared(path, **changes):
    config = npz_rows.config(npz_rows.write(path / "rows.npz", **changes))
    return prepare(config, jax.devices()[:4])


def test_valid_rows_are_accepted(tmp_path):
    assert prepared(tmp_path).program.batch["x"].shape == (16, npz_rows.NUM_FEATURES)


def test_a_dtype_that_jax_would_convert_is_an_error_before_a_run(tmp_path):
    message = r"array 'x' is float64, which jax would convert to float32.*astype"
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, dtype=np.float64)


@pytest.mark.parametrize(
    "change, message",
    {
        "type": (
            {"eval_label": np.zeros(40, np.int16)},
            r"'label' as int16\[\] in split 'eval' and as int32\[\] in split 'train'",
        ),
        "shape": (
            {"eval_x": np.zeros((40, 7), np.float32)},
            r"'x' as float32\[7\] in split 'eval' and as float32\[8\] in split 'train'",
        ),
    }.values(),
)
def test_splits_that_differ_are_an_error_before_a_run(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, **change)
