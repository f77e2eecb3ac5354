"""docs/api.md lists all of `meshloom.sharding`, with signatures."""

import inspect
import re
import types

from paths import ROOT

from meshloom import sharding
from meshloom.sharding import MeshSpec, Resolved, Rules, Sharder
from meshloom.sharding.audit import Audit
from meshloom.sharding.tree import ResolvedArray

PAGE = (ROOT / "docs" / "api.md").read_text()


def call(name: str, f) -> str:
    """Returns `name(a, *, b=1)`, without types and without self."""
    signature = inspect.signature(f)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]
    bare = signature.replace(
        parameters=parameters, return_annotation=inspect.Signature.empty
    )
    return f"{name}{bare}"


def members(cls: type) -> set[str]:
    """Returns the signatures of public methods, and the names of properties."""
    found = set()
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, classmethod) else value
        if isinstance(value, property) and not name.startswith("_"):
            found.add(name)
        elif inspect.isfunction(function) and not name.startswith("_"):
            found.add(call(name, function))
        elif name == "__call__":
            found.add(call("shard", function))
    return found


def section(heading: str) -> set[str]:
    """Returns the first column of the tables under a heading."""
    _, _, rest = PAGE.partition(f"\n## {heading}\n")
    assert rest, heading
    rows = re.findall(r"^\| `(.*?)` \|", rest.split("\n## ")[0], re.M)
    return set(rows)


def test_every_public_name_is_listed_with_its_signature():
    names = {
        name: value
        for name, value in vars(sharding).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    functions = {call(n, f) for n, f in names.items() if not inspect.isclass(f)}
    assert section("Functions") == functions
    classes = {name for name, value in names.items() if inspect.isclass(value)}
    assert classes == {"MeshSpec", "Resolved", "Rules", "Sharder"}


def test_every_member_of_the_classes_is_listed():
    for cls in (MeshSpec, Rules, Sharder, Resolved, Audit):
        assert section(cls.__name__) == members(cls), cls.__name__
    fields = set(ResolvedArray.__dataclass_fields__) - {"itemsize"}
    assert section("ResolvedArray") == fields | {
        name for name in members(ResolvedArray) if "(" not in name
    }
