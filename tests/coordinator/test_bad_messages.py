"""A message without sense gets one line, and the job goes on for all others."""

import pytest

from meshloom.service.coordinator.driver import METHODS
from meshloom.service.wire.errors import Refused

JUNK = (None, True, -1, 1.5, "x", [], [[]], {}, {"learner": []}, 10**30)
FIELDS = ("learner", "incarnation", "round", "base", "weight", "steps", "sums")
FIELDS += (
    "bytes",
    "blocks",
    "epoch",
    "owner",
    "reason",
    "kind",
    "row",
    "tree",
    "parts",
)


@pytest.fixture
def house(make_house):
    """A learner may begin round 1, another one has a merger below."""
    house = make_house(mode="local-sgd")
    house.start()
    for learner in range(2):
        house.ask("join", learner=learner, owner="x")
    house.initialize()
    return house


def messages():
    """Yields good messages in which one field is missing, or is of another kind."""
    part = {"learner": 0, "incarnation": 1, "round": 1, "base": 0, "weight": 2.0}
    part |= {"steps": 1, "sums": {"loss": 1.0}, "blocks": [[0, 1]], "bytes": 0}
    row = {"step": 0, "loss": 1.0}
    tree = {"key": [1 << 32, 5, 1], "of": [[0, 1, 1]]}
    good = {**part, "epoch": 0, "row": row, "kind": "eval", "tree": tree}
    good |= {"parts": [part]}
    yield {}
    for field in FIELDS:
        yield {name: value for name, value in good.items() if name != field}
        for junk in JUNK:
            yield {**good, field: junk}
            if field in part:
                yield {**good, "parts": [{**part, field: junk}]}
    for junk in JUNK:
        yield {**good, "row": {**row, "step": junk}}
        yield {**good, "row": {**row, "loss": junk}}
        yield {**good, "row": {**row, "local_step": junk}}
        yield {**good, "tree": {**tree, "key": junk}}
        yield {**good, "tree": {**tree, "of": junk}}
        yield {**good, "tree": {**tree, "of": [junk]}}
        yield {**good, "parts": [junk]}


@pytest.mark.parametrize("method", METHODS)
def test_a_message_without_sense_ends_nothing(house, method):
    refused = 0
    for message in messages():
        try:
            house.ask(method, **message)
        except Refused as error:
            assert "\n" not in str(error)
            refused += 1
    checked = {"join", "contribute", "contribute_sum", "leave", "report"}
    assert (refused > 0) == (method in checked)
    house.start()  # the log can be read again
    incarnation = house.ask("join", learner=1, owner="x")["incarnation"]
    assert house.next(1, incarnation, 0)["state"] in ("go", "wait")
