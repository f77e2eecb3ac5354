"""Python values as JSON and back, with their types."""

import collections
import dataclasses
import json
import math

import pytest

from meshloom.service.rounds import snapshot
from meshloom.service.rounds.encoding import decode, encode
from meshloom.service.rounds.engine import Engine
from meshloom.service.rounds.policy import make_policy


@dataclasses.dataclass
class Point:
    x: int
    y: object


CLASSES = {"Point": Point}
VALUES = [
    *(None, True, 3, 0.1, "é", [1, "2", [3]], (1, (2,)), {3, 1}, {}),
    {1: "a", (2, 3): [4]},
    [float("inf"), -float("inf")],
    {"tuple": [1]},  # looks like an encoded one
    collections.deque([1.5, 2.5], maxlen=3),
    collections.Counter([5, 5, 7]),
    Point(1, {"p": Point(2, ())}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_with_their_types(value):
    text = json.dumps(encode(value, CLASSES), allow_nan=False)
    found = decode(json.loads(text), CLASSES)
    assert found == value and type(found) is type(value)
    if isinstance(value, collections.deque):
        assert found.maxlen == value.maxlen


@pytest.mark.parametrize(
    ("numbers", "size"),
    [(list(range(1, 10_000)), 25), (list(range(3, 9999, 24)), 30), ([5] * 40, 25)],
)
def test_long_lists_of_numbers_are_short(numbers, size):
    text = json.dumps(encode(numbers, {}))
    assert len(text) < size and decode(json.loads(text), {}) == numbers


def test_a_number_that_is_none_comes_back_too():
    found = decode(json.loads(json.dumps(encode(math.nan, {}), allow_nan=False)), {})
    assert math.isnan(found)


def test_irregular_lists_come_back_too():
    numbers = [i * i % 101 for i in range(200)]
    assert decode(json.loads(json.dumps(encode(numbers, {}))), {}) == numbers


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": 1, "b": 2}, "one field"),
        ({"Circle": {}}, "'Circle' is of no known type"),
        ({"Point": {"x": 1, "z": 2}}, r"Point: \['y', 'z'\] are missing or unknown"),
    ],
)
def test_what_was_not_encoded_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        decode(data, CLASSES)


def test_what_cannot_be_encoded_is_an_error():
    with pytest.raises(TypeError, match="object cannot be encoded"):
        encode(object(), CLASSES)


def test_a_snapshot_of_another_version_is_refused():
    engine = Engine(make_policy("sync"), 2, 3)
    data = snapshot.take(engine)
    del data["leases"]["_failures"]
    with pytest.raises(ValueError, match="Leases: .*_failures.* another version"):
        snapshot.put_back(Engine(make_policy("sync"), 2, 3), data)
