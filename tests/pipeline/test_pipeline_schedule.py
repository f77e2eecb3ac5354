"""Schedules, checked by playing them, not by the formulas that made them."""

import dataclasses
import itertools

import numpy as np
import pytest

from meshloom.sharding.pipeline import Schedule, make
from meshloom.sharding.pipeline.schedule import IDLE

pytestmark = pytest.mark.compiles_anew

# Microbatches fewer than, equal to, more than, and not a multiple of the stages.
CASES = [
    (name, S, M, R)
    for name, S, M in itertools.product(
        ("gpipe", "1f1b", "interleaved"), (1, 2, 4), (1, 3, 4, 8, 11)
    )
    for R in ((1, 2, 3) if name == "interleaved" else (1,))
]


@pytest.fixture(params=CASES, ids=str, scope="module")
def schedule(request) -> Schedule:
    name, S, M, R = request.param
    return make(name, S, M, R if name == "interleaved" else None)


def play(schedule: Schedule) -> dict[int, list[set[tuple[int, int]]]]:
    """Runs a schedule on sets of available inputs; fails if one is missing.

    Returns, by stage, the (microbatch, chunk) whose inputs are saved at each tick.
    """
    S, M, R = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    # What a stage received at the previous tick: (stage, microbatch, chunk).
    inputs = {(0, m, 0) for m in range(M)}
    gradients: set[tuple[int, int, int]] = set()
    saved: list[set[tuple[int, int]]] = [set() for _ in range(S)]
    history: dict[int, list[set[tuple[int, int]]]] = {s: [] for s in range(S)}
    done = {"forward": 0, "backward": 0}
    for tick in range(schedule.num_ticks):
        new_inputs, new_gradients = set(), set()
        for s in range(S):
            m, r = map(int, schedule.forward[tick, s])
            if m != IDLE:
                inputs.remove((s, m, r))  # KeyError: missing, or used before
                saved[s].add((m, r))
                done["forward"] += 1
                if s < S - 1:
                    new_inputs.add((s + 1, m, r))
                elif r < R - 1:
                    new_inputs.add((0, m, r + 1))
                else:
                    gradients.add((s, m, r))  # from the loss, in the same tick
            history[s].append(set(saved[s]))
            m, r = map(int, schedule.backward[tick, s])
            if m != IDLE:
                gradients.remove((s, m, r))
                saved[s].remove((m, r))
                done["backward"] += 1
                if s > 0:
                    new_gradients.add((s - 1, m, r))
                elif r > 0:
                    new_gradients.add((S - 1, m, r - 1))
        inputs |= new_inputs
        gradients |= new_gradients
    assert not inputs and not gradients and not any(saved)
    assert done == {"forward": S * M * R, "backward": S * M * R}
    return history


def test_every_operation_runs_once_when_its_input_is_available(schedule):
    play(schedule)


def test_two_live_inputs_never_share_a_slot(schedule):
    most = 0
    for stage, ticks in play(schedule).items():
        for live in ticks:
            slots = [int(schedule.slots[stage, m, r]) for m, r in live]
            assert len(set(slots)) == len(slots)
            assert all(0 <= slot < schedule.num_slots for slot in slots)
            most = max(most, len(live))
    assert schedule.num_slots == most  # and no slot is wasted


def test_saved_inputs_are_bounded(schedule):
    S, M, R = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    if schedule.name == "gpipe":
        assert schedule.num_slots == M
    elif R == 1:
        assert schedule.num_slots == min(M, 2 * S - 1)
    else:
        assert schedule.num_slots <= min(M * R, 2 * R * S - 1)


def test_the_number_of_ticks_matches_the_closed_form(schedule):
    S, M, R = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    if schedule.name == "gpipe":
        assert schedule.num_ticks == 2 * (M + S - 1)
    elif R == 1:
        assert schedule.num_ticks == M + 2 * (S - 1)
    elif M % S == 0:
        assert schedule.num_ticks == M * R + R * S - 1 + S - 1


def test_saved_inputs_do_not_grow_with_microbatches():
    assert make("1f1b", 4, 8).num_slots == make("1f1b", 4, 64).num_slots == 7
    few, many = (make("interleaved", 4, M, 2).num_slots for M in (8, 64))
    assert few == many == 11
    assert make("gpipe", 4, 64).num_slots == 64


def test_interleaved_with_one_chunk_is_1f1b():
    a, b = make("interleaved", 3, 7, 1), make("1f1b", 3, 7)
    np.testing.assert_array_equal(a.forward, b.forward)
    np.testing.assert_array_equal(a.backward, b.backward)


def test_interleaved_has_two_chunks_unless_told():
    assert make("interleaved", 2, 4).num_chunks == 2
    assert make("interleaved", 2, 4, 3).num_chunks == 3


# Errors.


def changed(kind: str, change) -> Schedule:
    schedule = make("1f1b", 3, 4)
    table = getattr(schedule, kind).copy()
    change(table)
    return dataclasses.replace(schedule, **{kind: table})


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_missing_operation_is_refused(kind):
    def drop(table):
        assert table[4, 1, 0] != IDLE
        table[4, 1] = IDLE

    with pytest.raises(
        ValueError,
        match=f"each {kind} of 4 microbatches, 1 chunks and 3 stages exactly once, "
        "found 11 operations, 11 of them distinct",
    ):
        changed(kind, drop)


def test_an_operation_without_a_microbatch_is_refused():
    def rename(table):
        table[2, 1, 0] = 4  # there are 0 to 3

    with pytest.raises(ValueError, match="found 12 operations, 12 of them distinct"):
        changed("forward", rename)


def test_a_repeated_operation_is_refused():
    def repeat(table):
        table[-1, 1] = table[2, 1]

    with pytest.raises(ValueError, match="found 13 operations, 12 of them distinct"):
        changed("forward", repeat)


@pytest.mark.parametrize(
    "kind, stage, ticks, source",
    [("forward", 1, [1, 2], 0), ("backward", 0, [4, 5], 1)],
)
def test_an_operation_before_its_input_is_refused(kind, stage, ticks, source):
    def swap(table):
        table[ticks, stage] = table[ticks[::-1], stage]

    with pytest.raises(
        ValueError,
        match=f"1f1b: microbatch 0, chunk 0, stage {stage}: its {kind} must come one "
        f"tick after that of microbatch 0, chunk 0, stage {source}",
    ):
        changed(kind, swap)


def test_a_backward_before_its_forward_is_refused():
    schedule = make("1f1b", 3, 4)
    early = np.concatenate([schedule.backward[1:], schedule.backward[:1]])
    with pytest.raises(ValueError, match="stage 2: its backward comes before its for"):
        dataclasses.replace(schedule, backward=early)


def test_tables_of_different_length_are_refused():
    schedule = make("1f1b", 3, 4)
    with pytest.raises(
        ValueError, match=r"table of backwards must have the shape \[8 ticks, 3 stages"
    ):
        dataclasses.replace(schedule, backward=schedule.backward[:-1])


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            ("2f2b", 2, 4),
            "schedule must be one of gpipe, 1f1b, interleaved, got '2f2b'",
        ),
        (("1f1b", 0, 4), "the number of stages must be >= 1, got 0"),
        (("1f1b", 2, -1), "the number of microbatches must be >= 1, got -1"),
        (("interleaved", 2, 4, 0), "the number of chunks must be >= 1, got 0"),
        (("1f1b", 2, 4, 2), "schedule 1f1b has one chunk .* use schedule interleaved"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(*settings)
