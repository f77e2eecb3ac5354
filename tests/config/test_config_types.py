import collections.abc
import dataclasses
import typing
from typing import Annotated, Any, Literal, Protocol

import pytest

from meshloom.trainer.config.types import conform, describe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    size: int = 1


class Reads(Protocol):
    size: int

    def read(self) -> bytes: ...


class Reader:
    size = 3

    def read(self):
        return b""


@pytest.mark.parametrize(
    ("value", "annotation", "result"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (3, int | float, 3),
        (3, float | None, 3.0),
        (None, int | None, None),
        ([1, 2], tuple[int, ...], (1, 2)),
        ((1, "a"), tuple[int, str], (1, "a")),
        ([1], list[float], [1.0]),
        ({"a": 1}, collections.abc.Mapping[str, float], {"a": 1.0}),
        ([1], collections.abc.Sequence[int], [1]),
        ("a", Literal["a", 1], "a"),
        (3, Annotated[int, "positive"], 3),
        (3, typing.NewType("Count", int), 3),
        (print, collections.abc.Callable[[str], None], print),
        (Leaf, type[Leaf], Leaf),
        (Leaf, Any, Leaf),
    ],
)
def test_conform(value, annotation, result):
    found = conform(value, annotation)
    assert found == result and type(found) is type(result)


def test_conform_to_a_protocol():
    reader = Reader()
    assert conform(reader, Reads) is reader


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (True, int, "int"),
        (True, float, "float"),
        ("3", int, "int"),
        (3.0, int, "int"),
        (None, int, "int"),
        (1, None, "None"),
        ("x", int | None, "int or None"),
        ("ab", collections.abc.Sequence[str], "Sequence[str]"),
        ((1, 2), tuple[int], "tuple[int]"),
        ((1, "a"), tuple[int, ...], "tuple[int, ...]"),
        ((1,), list[int], "list[int]"),
        ({"a": "b"}, dict[str, int], "dict[str, int]"),
        (True, Literal[1, "a"], "1 or 'a'"),
        (3, collections.abc.Callable[[], int], "a callable"),
        (Leaf, Leaf, "test_config_types.Leaf"),
        (Reader, Reads, "test_config_types.Reads"),
        (Leaf(), Reads, "test_config_types.Reads"),
        (Leaf(), type[Leaf], "type[test_config_types.Leaf]"),
    ],
)
def test_conform_rejects(value, annotation, expected):
    with pytest.raises(TypeError):
        conform(value, annotation)
    assert describe(annotation) == expected
