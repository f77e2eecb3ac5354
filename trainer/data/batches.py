"""Batches of a dataset, on the host and on the devices.

- A *source* is a config node: plain data that says where examples come from.
- A *dataset* is one opened split of a source, with random access to its examples.
- An *order* maps example k of the run to an example of the dataset. It has no state.
- *Batches* maps step n to the rows of its batch that this process needs.

Batch n holds the examples n * batch_size to (n + 1) * batch_size - 1 of the order, and
update n + 1 consumes it. It is therefore a pure function of (dataset, seed, n) for any
number of processes, and the step number is the only data position to save.
"""

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .orders import AnyOrder
from .sources import Dataset

Shardings = NamedSharding | Mapping[str, NamedSharding]

# The batch array with each row's index in the dataset. Batches have it in addition to
# the dataset's own arrays if there is a sharding for it.
SAMPLE_IDS = "sample_ids"
# The batch array of per-example or per-token weights; it is 0 in padding rows.
WEIGHTS = "weights"


@dataclasses.dataclass(frozen=True)
class Share:
    """Which of several learners computes a part of every step.

    Each takes an n-th of the rows: one block of the run's order in batches of that
    size. Which block it is, the service says (service/rounds/leases.py).
    """

    index: int = 0
    count: int = 1

    def __post_init__(self):
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"learner {self.index} is not one of {self.count}, counted from 0"
            )

    def size(self, batch_size: int) -> int:
        """Returns the number of rows of the share."""
        if missing := -batch_size % self.count:
            raise ValueError(
                f"batch_size {batch_size} is not divisible by {self.count} learners; "
                f"{batch_size + missing} would be"
            )
        return batch_size // self.count


class Batches:
    """Batches by step, as NumPy arrays of the given rows.

    Args:
      batch_size: rows of the global batch.
      rows: the rows to read, for instance from `needed_rows`. None reads all of them.
      training: whether to read `dataset.example(i, epoch)` if the dataset has such a
        method. Evaluation always reads `dataset[i]`.
      num_examples: examples of the run. Rows past the end are padding: the first
        example with a weight of 0. None means that the run has no end.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: AnyOrder,
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
            raise ValueError(f"batch_size is {batch_size}; it must be >= 1.")
        if len(dataset) != order.num_examples:
            raise ValueError(
                f"the order has {order.num_examples} examples, but the dataset has "
                f"{len(dataset)}. Create it with Order(len(dataset), seed)."
            )
        if len(self.rows) == 0 or self.rows.min() < 0 or self.rows.max() >= batch_size:
            raise ValueError(
                f"rows are {self.rows.tolist()}; expected at least one row, each in "
                f"0..{batch_size - 1}."
            )

    def sample_ids(self, step: int) -> np.ndarray:
        """Returns the dataset index of each row of batch `step`."""
        return self.order.index(self._positions(step))[1]

    def _positions(self, step: int) -> np.ndarray:
        """Returns each row's position in the order; 0 for padding rows."""
        positions = step * self.batch_size + self.rows
        return np.where(self._is_padding(step), 0, positions)

    def _is_padding(self, step: int) -> np.ndarray:
        positions = step * self.batch_size + self.rows
        return positions >= (np.inf if self.num_examples is None else self.num_examples)

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
    """Returns the sorted batch rows that `devices` hold (default: this process's)."""
    several = shardings.values() if isinstance(shardings, Mapping) else [shardings]
    rows = set()
    for sharding in set(several):
        num_shards = _num_shards(sharding)
        _check_divisible("batch_size", batch_size, num_shards[0], sharding)
        # Only the rows matter here, so the other dimensions get any size that divides.
        index_map = sharding.devices_indices_map((batch_size, *num_shards[1:]))
        for device in sharding.addressable_devices if devices is None else devices:
            rows.update(range(*index_map[device][0].indices(batch_size)))
    return np.array(sorted(rows), np.int64)


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Raises if jax would convert the array to another dtype."""
    canonical = jax.dtypes.canonicalize_dtype(dtype)
    if canonical != dtype:
        raise ValueError(
            f"batch array '{name}' is {dtype}, which jax would convert to {canonical}. "
            f"Return {canonical} from the dataset, for instance with "
            f".astype(np.{canonical})."
        )


def _num_shards(sharding: NamedSharding) -> list[int]:
    """Returns the number of shards along each dimension of the spec, at least one."""
    num_shards = []
    for axes in sharding.spec:
        names = axes if isinstance(axes, tuple) else (axes,)
        sizes = [sharding.mesh.shape[name] for name in names if name is not None]
        num_shards.append(int(np.prod(sizes, dtype=np.int64)))
    return num_shards or [1]


def _check_divisible(
    what: str, size: int, num_shards: int, sharding: NamedSharding
) -> None:
    if size % num_shards:
        raise ValueError(
            f"{what} {size} cannot be sharded {num_shards} ways by {sharding.spec} on "
            f"mesh {dict(sharding.mesh.shape)}. Make it a multiple of {num_shards}, "
            f"for instance {-(-size // num_shards) * num_shards}, or change the mesh."
        )


def _check_array(
    name: str, shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding
) -> None:
    """Raises if jax would convert the array or could not shard it.

    `needed_rows` has already checked the rows, so this starts at dimension 1.
    """
    check_dtype(name, dtype)
    num_shards = _num_shards(sharding)
    if len(num_shards) > len(shape):
        raise ValueError(
            f"batch array '{name}' has shape {shape}, but its sharding {sharding.spec} "
            f"names {len(num_shards)} dimensions. Pass a sharding for this array."
        )
    for dim in range(1, len(num_shards)):
        what = f"batch array '{name}': dimension {dim} of size"
        _check_divisible(what, shape[dim], num_shards[dim], sharding)


class Loader:
    """Reads batches and places them on the devices. Threads may share it."""

    def __init__(self, batches: Batches, shardings: Shardings):
        self._batches = batches
        self._shardings = shardings
        self._checked: set[tuple[str, tuple[int, ...], np.dtype]] = set()
        # Maps a row of the global batch to its index among the rows that are read.
        self._local_rows = {int(row): i for i, row in enumerate(batches.rows)}

    def __call__(self, step: int) -> dict[str, jax.Array]:
        batch = self._batches[step]
        shardings = self._shardings
        if not isinstance(shardings, Mapping):
            shardings = dict.fromkeys(batch, shardings)
        if SAMPLE_IDS in shardings:
            batch[SAMPLE_IDS] = self._batches.sample_ids(step).astype(np.uint32)
        if batch.keys() != shardings.keys():
            raise ValueError(
                f"the dataset has the arrays {', '.join(sorted(batch))}, but there are "
                f"shardings for {', '.join(sorted(shardings))}. Pass one per array."
            )
        return {name: self._put(name, batch[name], shardings[name]) for name in batch}

    def _put(self, name: str, local: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """Returns the global array of which `local` holds this process's rows."""
        shape = (self._batches.batch_size, *local.shape[1:])
        if (name, shape, local.dtype) not in self._checked:
            _check_array(name, shape, local.dtype, sharding)
            self._checked.add((name, shape, local.dtype))

        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            # The local rows are sorted and include all of start..stop, so these rows
            # are adjacent.
            first = self._local_rows[start]
            return local[(slice(first, first + stop - start), *index[1:])]

        # A transfer guard sees an implicit transfer here, but this one is intended. It
        # is four times faster than one device_put per shard.
        with jax.transfer_guard_host_to_device("allow"):
            return jax.make_array_from_callback(shape, sharding, shard)


class DeviceBatches(Iterator[dict[str, jax.Array]]):
    """Iterates over batches on the devices, which threads prefetch.

    Close it when done, or use it as a context manager. It closes itself at the end and
    when a read fails.
    """

    def __init__(self, loader: Loader, steps: Sequence[int], prefetch: int):
        import grain

        self._loader = loader
        self._threads: set[threading.Thread] = set()
        self._closed = False
        options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
        dataset = grain.MapDataset.source(steps).map(self._load)
        self._iterator = iter(dataset.to_iter_dataset(options))
        self._iterator.start_prefetch()

    def __next__(self) -> dict[str, jax.Array]:
        try:
            return next(self._iterator)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops prefetching and waits for the reader threads to end."""
        self._closed = True
        self._iterator.close()
        # Grain does not join its threads, and a read in flight must not outlive us.
        for thread in self._threads - {threading.current_thread()}:
            thread.join()

    def __enter__(self) -> "DeviceBatches":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _load(self, step: int) -> dict[str, jax.Array]:
        """Reads the batch of a step and places it; runs in Grain's threads."""
        self._threads.add(threading.current_thread())
        if self._closed:
            raise ValueError("these batches are closed; create new ones to read more.")
        return self._loader(step)


def device_batches(
    dataset: Dataset,
    order: AnyOrder,
    *,
    batch_size: int,
    shardings: Shardings,
    start: int,
    stop: int,
    training: bool = True,
    prefetch: int = 2,
    num_examples: int | None = None,
) -> DeviceBatches:
    """Returns batches start..stop - 1 as global arrays, prefetched by threads.

    Each process reads only the rows that its own devices hold.

    Args:
      shardings: of arrays [batch, ...]: one for all arrays, or one per array name.
      start: number of updates done; the first batch is that of update start + 1.
      training: see `Batches`.
      prefetch: number of batches to keep ready; 0 reads in the calling thread.
      num_examples: see `Batches`.
    """
    if not 0 <= start <= stop:
        raise ValueError(
            f"start is {start}, stop is {stop}; expected 0 <= start <= stop."
        )
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}; it must be >= 0 batches.")
    rows = needed_rows(shardings, batch_size)
    batches = Batches(dataset, order, batch_size, rows, training, num_examples)
    return DeviceBatches(Loader(batches, shardings), range(start, stop), prefetch)
