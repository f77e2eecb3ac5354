"""Early stopping as a function of the evaluations, whatever is repeated."""

import dataclasses
import json
import math

import pytest

from meshloom.service.rounds.plateau import Plateau, StopRule


def after(losses, min_change=0.0, every=10) -> Plateau:
    plateau = Plateau()
    for number, loss in enumerate(losses, start=1):
        plateau = plateau.evaluated(every * number, loss, min_change)
    return plateau


@pytest.mark.parametrize(
    "losses, min_change, since, lowest",
    [
        ([3.0, 2.0, 1.0], 0.0, 0, 30),
        ([3.0, 2.0, 2.0, 2.5], 0.0, 2, 20),  # equal is not lower
        ([3.0, 2.0, 2.5, 1.9], 0.0, 0, 40),  # it starts to count anew
        ([3.0, 2.95, 2.91], 0.1, 2, 10),
        # Small steps add up: each is compared with the loss that counted last.
        ([3.0, 2.95, 2.89], 0.1, 0, 30),
        ([3.0, math.nan, math.inf, 2.9], 0.0, 0, 40),
        ([3.0, math.nan, math.inf], 0.0, 2, 10),
    ],
)
def test_evaluations_without_a_lower_loss_are_counted(
    losses, min_change, since, lowest
):
    found = after(losses, min_change)
    assert (found.since, found.loss_step) == (since, lowest)
    assert found.step == 10 * len(losses)


def test_a_repeated_evaluation_counts_once():
    found = after([3.0, 2.0, 2.5])
    assert found.evaluated(30, 9.0, 0.0) == found
    assert found.evaluated(20, 0.1, 0.0) == found
    assert found.evaluated(40, 9.0, 0.0).since == 2


def test_it_goes_to_json_and_back():
    for plateau in (Plateau(), after([3.0, 2.0, 2.5]), after([math.nan])):
        data = json.loads(json.dumps(plateau.to_json(), allow_nan=False))
        assert Plateau(**data) == plateau
    rule = StopRule(3, 0.5)
    assert StopRule.from_json(dataclasses.asdict(rule)) == rule


def test_the_reason_says_what_was_seen():
    rule = StopRule(2)
    assert rule.reason(after([3.0, 2.0, 2.5])) is None
    assert rule.reason(after([3.0, 2.0, 2.5, 2.0])) == (
        "in 2 evaluations the held-out loss did not fall below 2.0000, its value at "
        "step 20"
    )
    assert StopRule(1, 0.25).reason(after([3.0, 2.9], 0.25)) == (
        "in 1 evaluation the held-out loss did not fall by more than 0.25 below "
        "3.0000, its value at step 10"
    )
    assert rule.reason(after([math.nan, math.nan])) == (
        "the held-out loss was not finite in 2 evaluations"
    )


@pytest.mark.parametrize(
    "data, message",
    [
        ({"patience": 0, "min_change": 0.0}, "patience must be an integer >= 1, got 0"),
        ({"patience": True, "min_change": 0.0}, "patience must be an integer"),
        ({"patience": 2, "min_change": -1.0}, "min_change must be >= 0, got -1.0"),
        ({"patience": 2, "min_change": math.nan}, "min_change must be >= 0, got nan"),
        ({"patience": 2}, r"fields \['min_change'\] are missing or unknown"),
    ],
)
def test_rules_that_make_no_sense_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        StopRule.from_json(data)
