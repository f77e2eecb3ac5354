"""Dtypes by name, including those that numpy alone does not have."""

import ml_dtypes
import numpy as np

# The service adds up contributions in float32, which holds all of these exactly.
NAMES = ("float32", "bfloat16", "float16")


def dtype_of(name: str) -> np.dtype:
    """Returns the numpy dtype of a name that the service can exchange."""
    if name not in NAMES:
        raise ValueError(
            f"dtype {name!r} cannot be exchanged: expected one of {', '.join(NAMES)}; "
            "exclude the parameter from the exchange or change its dtype"
        )
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
