"""Optimizers of single rows, with numpy: the rows that are not given are not read.

Each operation rounds once, so the bits of a row do not depend on which rows are updated
together, as they may with a compiler that fuses a product with a sum.
"""

import numpy as np

from ..blocks.tables import Table

# Accumulators begin at zero: gradients of rows are small, being a share of a mean.
EPSILON = np.float32(1e-10)


def state_width(table: Table) -> int:
    """Returns how many numbers the state of a row has."""
    return 1 if table.optimizer == "adagrad" else 0


def initial_state(table: Table, rows: int) -> np.ndarray:
    return np.zeros((rows, state_width(table)), np.float32)


def updated(
    table: Table, rows: np.ndarray, grads: np.ndarray, state: np.ndarray, share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns new rows and their new state.

    Args:
      share: of a full update; scales the learning rate.
    """
    rate = np.float32(table.learning_rate) * np.float32(share)
    with np.errstate(all="ignore"):  # what is not finite never comes here
        step = grads * rate
        if table.optimizer == "adagrad":
            squares = np.square(grads).mean(axis=1, keepdims=True, dtype=np.float32)
            state = state + squares
            step = step / np.sqrt(state + EPSILON)
        return rows - step, state
