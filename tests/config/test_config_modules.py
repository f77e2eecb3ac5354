import types

import pytest

from meshloom.trainer.config.bindings import ConfigError, Ref
from meshloom.trainer.config.modules import (
    Written,
    find,
    find_all,
    import_module,
    is_callable,
)


class Model:
    pass


@pytest.fixture
def modules():
    toy = types.ModuleType("toy")
    vars(toy).update(Model=Model, size=3)
    return {"toy": toy}


def message(function, *args):
    with pytest.raises(ConfigError) as caught:
        function(*args, "mine.gin:9")
    return str(caught.value).removeprefix("mine.gin:9: ")


def test_references_are_found_in_nested_values(modules):
    value = {
        "a": [1, Written("slow/toy.Model", True)],
        "b": Written("toy.Model", False),
    }
    found = find_all(value, modules, "mine.gin:9")
    refs = [found["a"][1], found["b"]]
    assert found["a"][0] == 1 and all(isinstance(ref, Ref) for ref in refs)
    assert [(r.target, r.scope, r.call) for r in refs] == [
        (Model, ("slow",), True),
        (Model, (), False),
    ]


def test_is_callable(modules):
    names = ["toy.Model", "toy.size", "toy", "toy.none.x", "other"]
    assert [is_callable(name, modules) for name in names] == [True] + 4 * [False]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("toy.Modle", "toy has no class 'Modle'; did you mean 'Model'?"),
        ("tyo.Model", "'tyo' is not an imported module; did you mean 'toy'?"),
        ("Model", "'Model' is not an imported module; did you mean 'toy.Model'?"),
        ("toy", "toy has type module, expected a class; write toy.CLASS"),
        ("toy.size", "toy.size has type int, expected a class; write toy.size.CLASS"),
    ],
)
def test_message_of_a_name(modules, selector, expected):
    assert message(find, selector, modules) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "toyz",
            "no module named 'toyz'; install it, or add its folder to PYTHONPATH",
        ),
        (
            "meshloom.trainer.config.file",
            "no module named 'meshloom.trainer.config.file'; did you mean 'files'?",
        ),
        (
            "types.ModuleType",
            "no module named 'types.ModuleType'; import the module types and write"
            " its name in front of ModuleType",
        ),
    ],
)
def test_message_of_an_import(name, expected):
    assert message(import_module, name) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import toyz\n", "No module named 'toyz'"),
    ],
)
def test_a_module_that_fails(tmp_path, monkeypatch, source, reason):
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert message(import_module, "broken") == f"import of broken failed: {reason}"
