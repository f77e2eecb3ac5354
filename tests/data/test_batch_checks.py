"""What a dry run checks of the data: all that a run would refuse."""

import jax
import npz_rows
import numpy as np
import pytest

from meshloom.trainer.run.prepare import prepare


def prepared(path, **changes):
    config = npz_rows.config(npz_rows.write(path / "rows.npz", **changes))
    return prepare(config, jax.devices()[:4])


def test_sound_rows_are_taken(tmp_path):
    assert prepared(tmp_path).batch["x"].shape == (16, npz_rows.NUM_FEATURES)


def test_numbers_that_jax_would_change_are_refused_before_a_run(tmp_path):
    words = r"array 'x' is float64, which jax would turn into float32.*astype"
    with pytest.raises(ValueError, match=words):
        prepared(tmp_path, dtype=np.float64)


@pytest.mark.parametrize(
    "change, words",
    {
        "type": (
            {"eval_label": np.zeros(40, np.int16)},
            r"'label' as int16\[\] in split 'eval' and int32\[\] in split 'train'",
        ),
        "shape": (
            {"eval_x": np.zeros((40, 7), np.float32)},
            r"'x' as float32\[7\] in split 'eval' and float32\[8\] in split 'train'",
        ),
    }.values(),
)
def test_splits_that_differ_are_refused_before_a_run(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        prepared(tmp_path, **change)
