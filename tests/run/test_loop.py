"""The loop: steps run ahead, metrics are fetched late, hooks are called when due."""

import dataclasses
import itertools

import numpy as np
import pytest

from meshloom.trainer.run import loop


@dataclasses.dataclass
class Figure:
    """A number on a device that records when it is fetched."""

    value: int
    events: list

    def __array__(self, dtype=None, copy=None):
        self.events.append(("fetch", self.value))
        return np.array(self.value, np.float32)


class Machine:
    """A step function with a log of what was dispatched, fetched and called, in order.

    A state is the number of steps done; the loss of step n is n.
    """

    def __init__(self):
        self.events = []
        self.rows = []

    def step(self, state, batch):
        assert batch == state  # the batch of the step after `state` updates
        self.events.append(("step", state + 1))
        return state + 1, {"loss": Figure(state + 1, self.events)}

    def record(self, rows):
        self.rows += rows

    def hook(self, name, every):
        return Hook(name, every, self.events)

    def run(self, *, start=0, num_steps, **options):
        return loop.run(
            self.step,
            start,
            itertools.count(start),
            start=start,
            num_steps=num_steps,
            record=self.record,
            **options,
        )


@dataclasses.dataclass
class Hook:
    name: str
    every: int
    events: list

    def __call__(self, step, state):
        assert step == state
        self.events.append((self.name, step))


@pytest.fixture
def machine():
    return Machine()


def fetched(machine):
    """Returns {steps dispatched so far: the steps whose metrics were fetched then}."""
    result, num_steps = {}, 0
    for kind, step in machine.events:
        if kind == "step":
            num_steps = step
        elif kind == "fetch":
            result.setdefault(num_steps, []).append(step)
    return result


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("record_every", [1, 4, 10, 100])
@pytest.mark.parametrize("every", [None, 0, 1, 3])
def test_each_step_is_recorded_once_in_order(machine, start, record_every, every):
    hooks = [] if every is None else [machine.hook("hook", every)]
    state = machine.run(
        start=start, num_steps=11, record_every=record_every, hooks=hooks
    )
    assert state == 11
    assert [row["step"] for row in machine.rows] == list(range(start + 1, 12))
    assert all(row["loss"] == row["step"] for row in machine.rows)
    assert all(type(row["loss"]) is float for row in machine.rows)


def test_the_newest_step_is_never_waited_for(machine):
    machine.run(num_steps=11, record_every=5)
    # Step 5 was running when 1 to 4 were fetched, and so on.
    assert fetched(machine) == {5: [1, 2, 3, 4], 10: [5, 6, 7, 8, 9], 11: [10, 11]}


def test_recording_every_step_still_stays_one_behind(machine):
    machine.run(num_steps=4, record_every=1)
    assert fetched(machine) == {2: [1], 3: [2], 4: [3, 4]}


def test_hooks_are_called_when_due_after_the_metrics_of_their_step(machine):
    hooks = [machine.hook("save", 4), machine.hook("eval", 3), machine.hook("end", 0)]
    machine.run(num_steps=10, record_every=100, hooks=hooks)
    calls = [e for e in machine.events if e[0] not in ("step", "fetch")]
    assert calls == [
        ("eval", 3),
        ("save", 4),
        ("eval", 6),
        ("save", 8),
        ("eval", 9),
        ("save", 10),
        ("eval", 10),
        ("end", 10),
    ]
    for name, step in calls:
        events = machine.events[: machine.events.index((name, step))]
        seen = [n for kind, n in events if kind == "fetch"]
        assert seen == list(range(1, step + 1))


def test_hooks_are_due_by_the_total_number_of_steps(machine):
    machine.run(start=5, num_steps=9, hooks=[machine.hook("save", 4)])
    assert [e for e in machine.events if e[0] == "save"] == [("save", 8), ("save", 9)]


def test_hooks_may_be_an_iterator(machine):
    hooks = iter([machine.hook("save", 2)])
    machine.run(num_steps=4, hooks=hooks)
    assert [e for e in machine.events if e[0] == "save"] == [("save", 2), ("save", 4)]


def test_nothing_left_to_do(machine):
    assert machine.run(start=7, num_steps=7, hooks=[machine.hook("save", 1)]) == 7
    assert machine.events == []


def test_a_record_that_raises_ends_the_run_before_hooks(machine):
    record = machine.record

    def refuse(rows):
        record(rows)
        if rows[-1]["step"] >= 6:
            raise FloatingPointError("loss is nan")

    machine.record = refuse
    with pytest.raises(FloatingPointError, match="nan"):
        machine.run(num_steps=10, hooks=[machine.hook("save", 3)])
    assert [e for e in machine.events if e[0] == "save"] == [("save", 3)]
    assert ("step", 7) not in machine.events


def test_errors_of_hooks_and_data_propagate(machine):
    def broken(step, state):
        raise OSError("disk is full")

    broken.every = 2
    with pytest.raises(OSError, match="disk is full"):
        machine.run(num_steps=5, hooks=[broken])
    assert machine.events[-1] == ("fetch", 2)

    def bad_batches():
        yield 0
        raise ValueError("bad record")

    machine = Machine()
    with pytest.raises(ValueError, match="bad record"):
        loop.run(
            machine.step,
            0,
            bad_batches(),
            start=0,
            num_steps=5,
            record=machine.record,
        )
    assert machine.events == [("step", 1)]


def test_data_that_ends_early_is_an_error(machine):
    with pytest.raises(ValueError, match="the data ended at step 2 of 5"):
        loop.run(
            machine.step,
            0,
            iter([0, 1]),
            start=0,
            num_steps=5,
            record=machine.record,
        )


class Ending(Hook):
    """A hook that ends the run at a step."""

    last = 6

    def __call__(self, step, state):
        super().__call__(step, state)
        self.is_over = step >= self.last

    is_over = False


def test_a_hook_can_end_the_run_for_itself_and_those_after_it(machine):
    before, save = machine.hook("before", 4), machine.hook("save", 5)
    ending, end = Ending("eval", 3, machine.events), machine.hook("end", 0)
    state = machine.run(
        num_steps=10,
        record_every=100,
        hooks=[before, ending, save, end],
        is_over=lambda: ending.is_over,
        should_stop=lambda step: step == 6,  # it has ended already
    )
    assert state == 6 and [row["step"] for row in machine.rows] == list(range(1, 7))
    calls = [e for e in machine.events if e[0] not in ("step", "fetch")]
    assert calls == [
        *(("eval", 3), ("before", 4), ("save", 5)),
        *(("eval", 6), ("save", 6), ("end", 6)),
    ]


def test_a_step_can_be_the_last_one_before_any_hook(machine):
    hooks = [machine.hook("save", 5), machine.hook("end", 0)]
    state = machine.run(
        num_steps=10,
        hooks=hooks,
        is_over=lambda: ("step", 3) in machine.events,
    )
    assert state == 3 and [row["step"] for row in machine.rows] == [1, 2, 3]
    calls = [e for e in machine.events if e[0] not in ("step", "fetch")]
    assert calls == [("save", 3), ("end", 3)]
