import dataclasses
import enum
import json
import math
from typing import Any

import pytest

from meshloom.trainer.config import tree as config_tree
from meshloom.trainer.config.tree import ABSENT, Change, diff


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    size: int = 1
    rate: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reordered:
    rate: float = 0.5
    size: int = 1


Reordered.__qualname__ = Leaf.__qualname__


@dataclasses.dataclass(frozen=True, kw_only=True)
class Root:
    leaf: Any = Leaf()
    many: Any = ()
    name: str = "x"
    derived: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        object.__setattr__(self, "derived", 7)


class Color(enum.Enum):
    RED = 1


def test_flatten_names_classes_and_leaves():
    config = Root(many=({"a": Leaf(size=2)}, [1, (2, 3)]))
    assert config_tree.flatten(config) == {
        "leaf": "test_config_tree.Leaf",
        "leaf.size": 1,
        "leaf.rate": 0.5,
        "many.0.a": "test_config_tree.Leaf",
        "many.0.a.size": 2,
        "many.0.a.rate": 0.5,
        "many.1": [1, [2, 3]],
        "name": "x",
    }


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (math.inf, "inf"),
        ((), []),
        ({1: (2,)}, {"1": [2]}),
        ({"b", "a"}, ["a", "b"]),
        (Color.RED, "Color.RED"),
        (dict, "builtins.dict"),
        (json.dumps, "json.dumps"),
    ],
)
def test_flat_values_are_json(value, plain):
    flat = config_tree.flatten(Root(many=value))
    assert json.loads(json.dumps(flat))["many"] == plain


def test_a_value_that_prints_its_address_is_refused():
    with pytest.raises(
        ValueError, match="^many is of type object, which prints as a memory"
    ):
        config_tree.flatten(Root(many=object()))


def test_digest_depends_on_values_alone():
    config = Root(leaf=Leaf(size=2, rate=1.0))
    same = Root(leaf=Reordered(size=2, rate=1))
    assert config_tree.digest(config) == config_tree.digest(same)
    assert config_tree.digest(config) != config_tree.digest(Root())
    assert config_tree.digest(Root(many=True)) != config_tree.digest(Root(many=1))
    assert len(config_tree.digest(config)) == 64


def test_to_json_and_back(tmp_path):
    config = Root(many=(Leaf(),))
    origins = {"leaf": "a.gin:1", "leaf.size": "--set leaf.size=1", "many": "a.gin:2"}
    recorded = config_tree.to_json(config, origins)
    assert recorded["digest"] == config_tree.digest(config)
    values = recorded["values"]
    assert values["leaf.size"] == {"value": 1, "origin": "--set leaf.size=1"}
    assert values["leaf.rate"]["origin"] == "a.gin:1"
    assert values["many.0.rate"]["origin"] == "a.gin:2"
    assert values["name"] == {"value": "x", "origin": "default"}
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    assert config_tree.read_run(tmp_path) == config_tree.flatten(config)


def test_read_run_messages(tmp_path):
    with pytest.raises(ValueError, match=r"config.json cannot be read \(No such file"):
        config_tree.read_run(tmp_path)
    for text in ("{", "[]", '{"values": {"a": 1}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="config.json is not a recorded config"):
            config_tree.read_run(tmp_path)


def test_diff():
    old = {"a": 1, "b": 1, "c": "x", "d": True}
    new = {"a": 1.0, "b": 2, "d": 1, "e": None}
    changes = diff(old, new)
    assert changes == [
        Change("b", 1, 2),
        Change("c", "x", ABSENT),
        Change("d", True, 1),
        Change("e", ABSENT, None),
    ]
    assert config_tree.format_diff(changes[:2]) == "b  1 -> 2\nc  'x' -> (absent)"
    assert config_tree.format_diff([]) == ""


def test_show_is_aligned():
    text = config_tree.show(Root(), {"leaf.size": "a.gin:3"})
    assert text.splitlines() == [
        "leaf      = test_config_tree.Leaf  # default",
        "leaf.size = 1                      # a.gin:3",
        "leaf.rate = 0.5                    # default",
        "many      = []                     # default",
        "name      = 'x'                    # default",
    ]
