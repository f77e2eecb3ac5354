"""The rooms: the direction of their imports, and docs/architecture."""

import importlib.util
import re
import shutil
import sys

import pytest
from paths import ROOT
from test_architecture import TRAINER_ROOMS

PAGE = (ROOT / "docs/architecture.md").read_text()


def load_architecture():
    path = ROOT / "docs/architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["architecture"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


architecture = load_architecture()


def backward(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns imports inside trainer/ of a later room, or of cli.py."""
    rank = {f"trainer/{room}": i for i, room in enumerate(TRAINER_ROOMS)}
    rank["trainer"] = len(rank)  # cli.py and warm.py come last; nothing imports them
    found: dict[str, set[str]] = {}
    for module, imported in modules.items():
        own = rank.get(architecture.room_of(module))
        for name in imported if own is not None else ():
            other = rank.get(architecture.room_of(name))
            if other is not None and other > own:
                short = name.removeprefix("trainer.")
                found.setdefault(module.removeprefix("trainer."), set()).add(short)
    return found


def test_imports_between_rooms_point_one_way():
    assert backward(architecture.imports()) == {}


@pytest.fixture
def copy(tmp_path):
    """A copy of the packages, to add wrong imports to."""
    for package in ("configs", "launch", "models", "service", "sharding", "trainer"):
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return tmp_path


@pytest.mark.parametrize(
    "file, line, found",
    [
        ("data/shuffle.py", "from ..run import loop", "run.loop"),
        ("data/shuffle.py", "from .. import run", "run"),
        ("data/shuffle.py", "from ..run.loop import Hook", "run.loop"),
        ("data/__init__.py", "from ..run import loop", "run.loop"),
        ("data/shuffle.py", "from ...trainer.run import loop", "run.loop"),
        ("data/shuffle.py", "import meshloom.trainer.run.loop as l", "run.loop"),
        ("data/shuffle.py", "from meshloom.trainer.run import loop", "run.loop"),
        ("data/shuffle.py", "def f():\n    from ..run import loop", "run.loop"),
        (
            "data/shuffle.py",
            "if TYPE_CHECKING:\n    from ..run import loop",
            "run.loop",
        ),
        ("plan/compile/walk.py", "from ...report import page", "report.page"),
        ("commands/ckpt.py", "from ..cli import main", "cli"),
    ],
)
def test_an_import_against_the_order_is_found(copy, file, line, found):
    path = copy / "trainer" / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert backward(architecture.imports(copy)) == {module: {found}}


def test_the_picture_has_the_order_of_the_rooms():
    inside = [room.name for room in architecture.ROOMS if "trainer" in room.name]
    expected = [f"trainer/{room}" for room in reversed(TRAINER_ROOMS)]
    assert inside == ["trainer", *expected]


def test_the_picture_agrees_with_the_code():
    drawn = architecture.draw(architecture.imports())
    shown = architecture.PICTURE.read_text()
    assert shown == drawn, "run: python docs/architecture.py"


def test_the_picture_changes_with_imports_and_files(copy):
    before = architecture.draw(architecture.imports(copy), copy)
    assert before == architecture.PICTURE.read_text()
    shuffle = copy / "trainer/data/shuffle.py"
    shuffle.write_text(
        f"{shuffle.read_text()}\n# Another line does not change the picture.\n"
    )
    assert architecture.draw(architecture.imports(copy), copy) == before
    (copy / "trainer/data/extra.py").touch()
    with_file = architecture.draw(architecture.imports(copy), copy)
    assert with_file != before
    (copy / "trainer/data/extra.py").write_text("from ..config import tree\n")
    with pytest.raises(ValueError, match="trainer/data imports trainer/config, which"):
        architecture.draw(architecture.imports(copy), copy)
    (copy / "trainer/data/extra.py").write_text("from ...sharding import mesh\n")
    assert architecture.draw(architecture.imports(copy), copy) != with_file


def test_every_file_that_the_page_names_exists():
    named = set(re.findall(r"`([\w./]+/[\w.]+\.(?:py|gin|md|svg))`", PAGE))
    assert len(named) > 50
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_page_has_a_row_for_every_room():
    rows = re.findall(r"^\| `([\w/]+)/` \|", PAGE, re.M)
    names = {room.name for room in architecture.ROOMS} - {"trainer"}
    assert set(rows) == names and len(rows) == len(names)
