"""Tests of the order of examples, of batches, and of batches on the devices."""

import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.trainer import data
from meshloom.trainer.data.batches import Batches, device_batches, needed_rows


class Numbers:
    """Example i contains 100 * i + column; records which examples were read."""

    unit = "tokens"
    units_per_example = 8

    def __init__(self, num_examples=50, dtype=np.int32, fail_at=None):
        self.num_examples = num_examples
        self.dtype = dtype
        self.fail_at = fail_at
        self.reads = []

    def __len__(self):
        return self.num_examples

    def __getitem__(self, i):
        self.reads.append(i)
        if i == self.fail_at:
            raise OSError(f"disk lost at {i}")
        columns = np.arange(8, dtype=self.dtype)
        return {
            "inputs": (100 * i + columns).astype(self.dtype),
            "label": np.array(i, np.int32),
        }

    def describe(self):
        return {"examples": self.num_examples}

    def loss_units(self, loss):
        return {}


def make_mesh(*sizes, devices=None):
    names = ("data", "tensor")[: len(sizes)]
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def collect(dataset, order, shardings, *, start=0, stop=4, batch_size=8, prefetch=2):
    with device_batches(
        dataset,
        order,
        batch_size=batch_size,
        shardings=shardings,
        start=start,
        stop=stop,
        prefetch=prefetch,
    ) as batches:
        return list(batches)


def reading_threads(wait=5.0):
    """Returns Grain's threads; waits for those that are about to end."""
    deadline = time.monotonic() + wait
    while True:
        found = [t for t in threading.enumerate() if "grain" in t.name]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 99, 1000, 4097])
def test_each_epoch_is_a_permutation(size):
    order = data.Order(size, seed=3)
    epochs, indices = order.index(np.arange(3 * size))
    assert epochs.tolist() == [0] * size + [1] * size + [2] * size
    for epoch in range(3):
        seen = np.sort(indices[epoch * size : (epoch + 1) * size])
        np.testing.assert_array_equal(seen, np.arange(size))


def test_order_depends_on_seed_and_epoch():
    orders = [data.Order(1000, seed=seed).index(np.arange(2000))[1] for seed in (0, 1)]
    parts = [part for order in orders for part in (order[:1000], order[1000:])]
    for i, part in enumerate(parts):
        assert (part != np.arange(1000)).mean() > 0.98
        for other in parts[:i]:
            # Two random permutations of 1000 agree at one position on average.
            assert (part == other).sum() < 20


def test_order_is_uniform():
    """Over 20,000 epochs each example is at each position equally often."""
    size, epochs = 6, 20_000
    indices = data.Order(size, seed=0).index(np.arange(size * epochs))[1]
    orders = indices.reshape(epochs, size)
    counts = np.stack([(orders == i).sum(axis=0) for i in range(size)])
    # Binomial: standard deviation 53 around 3333; 36 counts, so 5 deviations.
    np.testing.assert_allclose(counts, epochs / size, atol=5 * 53)


def test_order_never_changes():
    """The order of existing runs: if this fails, they cannot be resumed."""
    epochs, indices = data.Order(10, seed=7).index(np.arange(20))
    assert epochs.tolist() == [0] * 10 + [1] * 10
    assert indices.tolist() == [
        3,
        2,
        0,
        4,
        5,
        7,
        8,
        6,
        9,
        1,
        2,
        0,
        8,
        3,
        9,
        6,
        4,
        1,
        5,
        7,
    ]
    large = data.Order(10**12, seed=2**40).index(10**12 + 5)
    assert large == (1, 981993185998)


def test_order_without_shuffle_and_of_one_number():
    order = data.Order(5, shuffle=False)
    assert order.index(13) == (2, 3)
    shuffled = data.Order(5, seed=1)
    alone = [shuffled.index(k) for k in range(15)]
    epochs, indices = shuffled.index(range(15))
    assert alone == list(zip(epochs.tolist(), indices.tolist(), strict=True))


def test_order_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="num_examples is 0; it must be >= 1"):
        data.Order(0)
    with pytest.raises(ValueError, match="example number is -1; it must be >= 0"):
        data.Order(5).index(-1)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_batches_are_the_same_for_any_number_of_processes(num_processes):
    order = data.Order(50, seed=1)
    one_process = Batches(Numbers(), order, 8)
    per_process = 8 // num_processes
    for step in (0, 1, 6, 1000):
        parts = []
        for process in range(num_processes):
            dataset = Numbers()
            rows = np.arange(per_process) + process * per_process
            mine = Batches(dataset, order, 8, rows)
            parts.append(mine[step])
            assert dataset.reads == mine.sample_ids(step).tolist()
            assert len(dataset.reads) == per_process
        for name, array in one_process[step].items():
            together = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(array, together)


def test_batches_cover_an_epoch_once():
    batches = Batches(Numbers(48), data.Order(48, seed=2), 8)
    labels = np.concatenate([batches[step]["label"] for step in range(6)])
    assert sorted(labels.tolist()) == list(range(48))


def test_batches_reject_invalid_arguments():
    order = data.Order(50)
    with pytest.raises(ValueError, match="batch_size is 0"):
        Batches(Numbers(), order, 0)
    with pytest.raises(ValueError, match="order has 50 examples.*has 49"):
        Batches(Numbers(49), order, 8)
    with pytest.raises(ValueError, match=r"each in 0\.\.7"):
        Batches(Numbers(), order, 8, [8])


LAYOUTS = {
    "data=8": ((8,), P("data"), P("data")),
    "data=2,tensor=4": ((2, 4), P("data"), P("data")),
    "columns sharded": ((2, 4), P("data", "tensor"), P("data")),
    "rows sharded over both": ((2, 4), P(("data", "tensor")), P(("data", "tensor"))),
    "only columns sharded": ((2, 4), P(None, "tensor"), P()),
    "replicated": ((2, 4), P(), P()),
}


@pytest.fixture
def no_implicit_transfers():
    # Applies to all threads; the context manager would guard only this one.
    jax.config.update("jax_transfer_guard", "disallow")
    yield
    jax.config.update("jax_transfer_guard", "allow")


@pytest.mark.usefixtures("no_implicit_transfers")
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_device_batches_equal_host_batches_on_every_mesh(layout, prefetch):
    sizes, inputs_spec, label_spec = LAYOUTS[layout]
    mesh = make_mesh(*sizes)
    shardings = {
        "inputs": NamedSharding(mesh, inputs_spec),
        "label": NamedSharding(mesh, label_spec),
    }
    order = data.Order(50, seed=5)
    host = Batches(Numbers(), order, 8)
    batches = collect(Numbers(), order, shardings, start=3, stop=9, prefetch=prefetch)
    assert len(batches) == 6
    for step, batch in enumerate(batches, start=3):
        for name, array in batch.items():
            assert array.sharding == shardings[name]
            np.testing.assert_array_equal(jax.device_get(array), host[step][name])
    assert not reading_threads()


def test_needed_rows_of_each_half_of_the_devices():
    """Two processes with four devices each, and a batch of 16 rows."""
    mesh = make_mesh(2, 4)
    halves = mesh.devices[0].tolist(), mesh.devices[1].tolist()

    def rows(spec, devices):
        return needed_rows(NamedSharding(mesh, spec), 16, devices).tolist()

    for half, devices in enumerate(halves):
        mine = list(range(8 * half, 8 * half + 8))
        assert rows(P("data"), devices) == mine
        assert rows(P("data", "tensor"), devices) == mine
        assert rows(P(("data", "tensor")), devices) == mine
        assert rows(P(None, "data"), devices) == list(range(16))
        scattered = rows(P(("tensor", "data")), devices)
        assert scattered == [r for r in range(16) if r // 2 % 2 == half]


def test_only_the_needed_rows_are_read():
    mesh = make_mesh(2, devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, P("data"))
    dataset = Numbers()
    order = data.Order(50, seed=5)
    collect(dataset, order, sharding, stop=3, prefetch=0)
    assert dataset.reads == order.index(np.arange(24))[1].tolist()
    assert needed_rows(sharding, 8, jax.devices()[:1]).tolist() == [0, 1, 2, 3]


def test_reader_errors_reach_the_consumer_and_end_the_threads():
    dataset = Numbers(fail_at=13)
    sharding = NamedSharding(make_mesh(8), P("data"))
    batches = device_batches(
        dataset,
        data.Order(50, shuffle=False),
        batch_size=8,
        shardings=sharding,
        start=0,
        stop=5,
    )
    assert next(batches)["label"][0] == 0
    with pytest.raises(OSError, match="disk lost at 13"):
        next(batches)
    assert not reading_threads()


def test_close_waits_for_reads_in_flight():
    class Slow(Numbers):
        def __getitem__(self, i):
            time.sleep(0.02)
            return super().__getitem__(i)

    dataset = Slow()

    sharding = NamedSharding(make_mesh(8), P("data"))
    batches = device_batches(
        dataset,
        data.Order(50),
        batch_size=8,
        shardings=sharding,
        start=0,
        stop=100,
        prefetch=2,
    )
    assert reading_threads(wait=0)
    batches.close()
    num_reads = len(dataset.reads)
    time.sleep(0.1)
    assert len(dataset.reads) == num_reads
    assert not reading_threads()
    batches.close()


def test_reading_is_ahead_of_the_consumer():
    dataset = Numbers()
    sharding = NamedSharding(make_mesh(8), P("data"))
    with device_batches(
        dataset,
        data.Order(50),
        batch_size=8,
        shardings=sharding,
        start=0,
        stop=10,
        prefetch=2,
    ) as batches:
        deadline = time.monotonic() + 10
        while len(dataset.reads) < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
        # Exactly two batches are ready before the first is requested.
        time.sleep(0.05)
        assert len(dataset.reads) == 16
        next(batches)


def test_device_batches_reject_invalid_arguments():
    mesh = make_mesh(2, 4)
    rows = NamedSharding(mesh, P("data"))
    order = data.Order(50)
    with pytest.raises(
        ValueError,
        match=r"batch_size 6 cannot be sharded 8 ways.*multiple of 8, for instance 8",
    ):
        both = NamedSharding(mesh, P(("data", "tensor")))
        collect(Numbers(), order, both, batch_size=6)
    with pytest.raises(ValueError, match="inputs, label.*shardings for inputs"):
        collect(Numbers(), order, {"inputs": rows})
    with pytest.raises(ValueError, match="'label' has shape.*names 2 dimensions"):
        collect(Numbers(), order, NamedSharding(mesh, P("data", "tensor")))
    with pytest.raises(ValueError, match="'inputs' is float64.*convert to float32"):
        collect(Numbers(dtype=np.float64), order, rows)
    with pytest.raises(ValueError, match="start <= stop"):
        collect(Numbers(), order, rows, start=2, stop=1)
    with pytest.raises(ValueError, match="prefetch is -1"):
        collect(Numbers(), order, rows, prefetch=-1)
    assert not reading_threads()


def test_a_dimension_that_cannot_be_sharded_is_named():
    columns = NamedSharding(
        make_mesh(2, 3, devices=jax.devices()[:6]), P(None, "tensor")
    )
    shardings = {"inputs": columns, "label": NamedSharding(columns.mesh, P())}
    with pytest.raises(
        ValueError, match=r"'inputs': dimension 1 of size 8 cannot be sharded 3 ways.*9"
    ):
        collect(Numbers(), data.Order(50), shardings)
