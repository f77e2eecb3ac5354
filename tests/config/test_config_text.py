import dataclasses
import json
import math
from typing import Any

import pytest

from meshloom.trainer.config.text import GinText


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    size: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Root:
    leaf: Any = None
    many: Any = ()
    name: str = "x"


def test_every_field_is_written_with_its_origin():
    origins = {"leaf": "a.gin:3", "name": "--set name='y'"}
    text = str(GinText(Root(leaf=Leaf(), name="y"), origins))
    assert text.startswith("from __gin__ import dynamic_registration\n")
    assert text.splitlines()[-5:] == [
        "test_config_text.Root.leaf = @test_config_text.Leaf()  # a.gin:3",
        "test_config_text.Root.many = ()  # default",
        "test_config_text.Root.name = 'y'  # --set name='y'",
        "",
        "test_config_text.Leaf.size = 1  # a.gin:3",
    ]


def test_a_class_used_twice_gets_scopes():
    text = str(GinText(Root(many=[Leaf(size=2), Leaf(size=3)]), {}))
    first, second = (f"at_many_{i}/test_config_text.Leaf" for i in range(2))
    assert f".many = [@{first}(), @{second}()]  # default\n" in text
    assert f"{first}.size = 2  # default\n" in text
    assert f"{second}.size = 3  # default\n" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1,), "(1,)"),
        ({"a": [None, "b"]}, "{'a': [None, 'b']}"),
        (-math.inf, "-1e999"),
        (json.dumps, "@json.dumps"),
    ],
)
def test_a_value_as_gin_reads_it(value, text):
    assert f".many = {text}  # default\n" in str(GinText(Root(many=value), {}))


def test_gin_text_lists_what_gin_cannot_say():
    written = GinText(Root(many=[math.nan], name="a"), {})
    assert written.gaps == ["many"]
    assert "# many = [nan]: gin cannot express this value  # default\n" in str(written)
