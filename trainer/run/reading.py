"""The batches that a run trains on, on its devices."""

from collections.abc import Callable, Sequence

from ..data.batches import Batches, DeviceBatches, Loader, needed_rows
from ..data.leased import LeasedBatches
from .prepare import Prepared

PREFETCH = 2


def batches_of(prepared: Prepared, numbers: Sequence[int]) -> DeviceBatches:
    """Returns batches of the run's order, by their numbers."""
    return DeviceBatches(_loader(prepared), numbers, PREFETCH)


def leased_batches(
    prepared: Prepared, upcoming: Callable[[], Sequence[int]]
) -> LeasedBatches:
    """Returns the batches of a learner; see LeasedBatches."""
    return LeasedBatches(_loader(prepared), upcoming, PREFETCH)


def _loader(prepared: Prepared) -> Loader:
    data, shardings = prepared.train_data, prepared.program.batch_shardings
    rows = needed_rows(shardings, prepared.batch_size)
    return Loader(Batches(data, prepared.order, prepared.batch_size, rows), shardings)
