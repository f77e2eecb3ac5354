"""Data: from a source to batches on the devices.

- A *source* is a node of the config: plain data that says where examples come from.
- A *dataset* is an opened split of a source: examples with random access by number.
- An *order* says which example is number k of the run: arithmetic, no state.
- *Batches* are the rows of the batch of step n that this process needs.

Batch n is made of the examples n * batch_size to (n + 1) * batch_size - 1 of the
order, and update n + 1 uses it. So it is a pure function of (dataset, seed, n),
whatever the number of processes, and the step number is all of the data's position.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .shuffle import Order
from .sources import Dataset

Shardings = NamedSharding | Mapping[str, NamedSharding]

# The array of a batch that holds each row's number in the dataset; where there is a
# sharding for it, batches have it beside the dataset's own arrays.
SAMPLE_IDS = "sample_ids"
# The array by which rows count; those that fill up a batch count 0.
WEIGHTS = "weights"


class Batches:
    """The batches of a run, by number; only the given rows of each are read.

    Args:
        batch_size: rows of the global batch.
        rows: the rows to read, for instance `needed_rows`; None means all.
        training: whether a dataset with a method `example(i, epoch)` is read by it;
            evaluation always reads `dataset[i]`.
        num_examples: of the run; rows after them hold the first example, at a weight
            of 0. None for a run without an end.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: Order,
        batch_size: int,
        rows: Sequence[int] | np.ndarray | None = None,
        training: bool = True,
        num_examples: int | None = None,
    ):
        self.dataset = dataset
        self.num_examples = num_examples
        self.order = order
        self.batch_size = batch_size
        self.rows = np.arange(batch_size) if rows is None else np.asarray(rows)
        self._example = getattr(dataset, "example", None) if training else None
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected at least 1.")
        if len(dataset) != order.num_examples:
            raise ValueError(
                f"the order is of {order.num_examples} examples, but the dataset has "
                f"{len(dataset)}; make it with Order(len(dataset), seed)."
            )
        if len(self.rows) == 0 or self.rows.min() < 0 or self.rows.max() >= batch_size:
            raise ValueError(
                f"rows are {self.rows.tolist()}; expected numbers of 0 to "
                f"{batch_size - 1}, at least one."
            )

    def sample_ids(self, step: int) -> np.ndarray:
        """Returns the number in the dataset of each row of batch `step`."""
        return self.order.index(self._positions(step))[1]

    def _positions(self, step: int) -> np.ndarray:
        """In the order; 0 for rows that only fill up the batch."""
        numbers = step * self.batch_size + self.rows
        return np.where(self._is_padding(step), 0, numbers)

    def _is_padding(self, step: int) -> np.ndarray:
        numbers = step * self.batch_size + self.rows
        return numbers >= (np.inf if self.num_examples is None else self.num_examples)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        epochs, ids = self.order.index(self._positions(step))
        if self._example is None:
            examples = [self.dataset[i] for i in ids.tolist()]
        else:
            pairs = zip(ids.tolist(), epochs.tolist(), strict=True)
            examples = [self._example(i, epoch) for i, epoch in pairs]
        batch = {
            name: np.stack([example[name] for example in examples])
            for name in examples[0]
        }
        if (padding := self._is_padding(step)).any():
            batch[WEIGHTS][padding] = 0
        return batch


def needed_rows(
    shardings: Shardings, batch_size: int, devices: Any = None
) -> np.ndarray:
    """Returns the rows of the batch that `devices` (this process's) hold, sorted."""
    several = shardings.values() if isinstance(shardings, Mapping) else [shardings]
    rows = set()
    for sharding in set(several):
        # Only the first dimension is asked about: the others get a size that fits.
        ways = _ways(sharding)
        if batch_size % ways[0]:
            raise ValueError(
                f"batch_size {batch_size} cannot be cut {ways[0]} ways by the sharding "
                f"{sharding.spec} on mesh {dict(sharding.mesh.shape)}. Make it a "
                f"multiple of {ways[0]}."
            )
        cuts = sharding.devices_indices_map((batch_size, *ways[1:]))
        held = sharding.addressable_devices if devices is None else devices
        for device in held:
            rows.update(range(*cuts[device][0].indices(batch_size)))
    return np.array(sorted(rows), np.int64)


def _ways(sharding: NamedSharding) -> list[int]:
    """Returns how many ways each dimension is cut; at least the first is listed."""
    ways = []
    for axes in sharding.spec:
        names = axes if isinstance(axes, tuple) else (axes,)
        sizes = [sharding.mesh.shape[name] for name in names if name is not None]
        ways.append(int(np.prod(sizes, dtype=np.int64)))
    return ways or [1]


def check_type(name: str, dtype: np.dtype) -> None:
    """Raises where jax would change the numbers of an array."""
    kept = jax.dtypes.canonicalize_dtype(dtype)
    if kept != dtype:
        raise ValueError(
            f"batch array '{name}' is {dtype}, which jax would turn into {kept}. Let "
            f"the dataset give {kept}, for instance by .astype(np.{kept})."
        )


def _check_cut(
    name: str, dtype: np.dtype, shape: tuple[int, ...], sharding: NamedSharding
) -> None:
    """Raises where jax would change the numbers or could not cut the array."""
    check_type(name, dtype)
    ways = _ways(sharding)
    if len(ways) > len(shape):
        raise ValueError(
            f"batch array '{name}' has shape {shape}, but its sharding "
            f"{sharding.spec} names {len(ways)} dimensions. Give it one of its own."
        )
    for number, (size, cut) in enumerate(zip(shape, ways, strict=False)):
        if size % cut:
            raise ValueError(
                f"batch array '{name}': dimension {number} of size {size} cannot be "
                f"cut {cut} ways by {sharding.spec}. Make it a multiple of {cut}, for "
                f"instance {-(-size // cut) * cut}, or change the mesh."
            )


class _Placed:
    """Batches start..stop as global arrays; what Grain's threads call."""

    def __init__(self, batches: Batches, shardings: Shardings, start: int, stop: int):
        self._batches = batches
        self._shardings = shardings
        self._start = start
        self._stop = stop
        self._checked: set[tuple[str, tuple[int, ...], np.dtype]] = set()
        # A global row's place among the rows that were read.
        self._places = {int(row): place for place, row in enumerate(batches.rows)}
        self.threads: set[threading.Thread] = set()
        self.closed = False

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> dict[str, jax.Array]:
        self.threads.add(threading.current_thread())
        if self.closed:
            raise ValueError("these batches are closed; make new ones to read on.")
        number = self._start + index
        batch = self._batches[number]
        shardings = self._shardings
        if not isinstance(shardings, Mapping):
            shardings = dict.fromkeys(batch, shardings)
        if SAMPLE_IDS in shardings:
            batch[SAMPLE_IDS] = self._batches.sample_ids(number).astype(np.uint32)
        if batch.keys() != shardings.keys():
            raise ValueError(
                f"the dataset gives the arrays {', '.join(sorted(batch))}, but there "
                f"are shardings for {', '.join(sorted(shardings))}. Give one for each."
            )
        return {name: self._put(name, batch[name], shardings[name]) for name in batch}

    def _put(self, name: str, local: np.ndarray, sharding: NamedSharding) -> jax.Array:
        shape = (self._batches.batch_size, *local.shape[1:])
        facts = (name, shape, local.dtype)
        if facts not in self._checked:
            _check_cut(name, local.dtype, shape, sharding)
            self._checked.add(facts)

        def piece(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            # The rows read are sorted and hold all of start..stop: they lie together.
            first = self._places[start]
            return local[(slice(first, first + stop - start), *index[1:])]

        # A transfer guard takes this call for an implicit transfer; it is the one that
        # is meant, and four times faster than device_put piece by piece.
        with jax.transfer_guard_host_to_device("allow"):
            return jax.make_array_from_callback(shape, sharding, piece)


class DeviceBatches(Iterator[dict[str, jax.Array]]):
    """Iterator of batches on the devices, read ahead by threads; close it when done.

    It closes itself at its end and when a read fails, and works as a context manager.
    """

    def __init__(self, placed: _Placed, prefetch: int):
        import grain

        self._placed = placed
        options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
        dataset = grain.MapDataset.source(placed)
        self._iterator = iter(dataset.to_iter_dataset(options))
        self._iterator.start_prefetch()

    def __next__(self) -> dict[str, jax.Array]:
        try:
            return next(self._iterator)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops reading ahead and waits for the reading threads to end."""
        self._placed.closed = True
        self._iterator.close()
        # Grain does not wait for its threads; a read in flight must not outlive us.
        for thread in self._placed.threads - {threading.current_thread()}:
            thread.join()

    def __enter__(self) -> "DeviceBatches":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def device_batches(
    dataset: Dataset,
    order: Order,
    *,
    batch_size: int,
    shardings: Shardings,
    start: int,
    stop: int,
    training: bool = True,
    prefetch: int = 2,
    num_examples: int | None = None,
) -> DeviceBatches:
    """Returns batches start..stop - 1 as global arrays, read ahead off this thread.

    Each process reads the rows that its own devices hold, and no others.

    Args:
        shardings: for arrays [batch, ...]: one for all, or one by name of array.
        start: number of updates done; the first batch is the one of update start + 1.
        training: see Batches.
        prefetch: batches to hold ready; 0 reads in the calling thread.
        num_examples: see Batches.
    """
    if not 0 <= start <= stop:
        raise ValueError(
            f"batches {start} to {stop}: expected 0 <= start <= stop, in updates."
        )
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}; expected at least 0 batches.")
    rows = needed_rows(shardings, batch_size)
    batches = Batches(dataset, order, batch_size, rows, training, num_examples)
    return DeviceBatches(_Placed(batches, shardings, start, stop), prefetch)
