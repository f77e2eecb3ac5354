"""Checks the layout rules on the source: who may import whom, and file sizes."""

import ast
import pathlib
import sys

import pytest
from paths import ROOT

MAY_IMPORT = {
    "package": set(),  # meshloom itself: its version, without imports
    "sharding": set(),
    "models": {"sharding"},
    "service": set(),
    "configs": set(),
    # launch starts trainer commands, which report back through statuses and files.
    "trainer": {"models", "sharding", "launch", "service"},
    "launch": set(),
}
# The rooms of the trainer: each may only import those before it.
TRAINER_ROOMS = (
    *("config", "data", "program", "record", "job", "checkpoint", "run"),
    "hf",
    *("verify", "plan", "report", "doctor", "tune", "commands"),
)
# The rooms of the service, and what each may import of the others.
SERVICE_ROOMS = {
    "rounds": set(),
    "blocks": set(),
    "store": set(),
    "wire": {"blocks"},
    "server": {"blocks", "wire"},
    "coordinator": {"rounds", "blocks", "wire", "store"},
    "learner": {"rounds", "blocks", "wire"},
    "merger": {"rounds", "blocks", "wire", "server"},
}
# Packages inside a package.
ROOMS = {
    "launch/targets",
    "sharding/hlo",
    "sharding/pipeline",
    *(f"service/{room}" for room in SERVICE_ROOMS),
    "trainer/plan/compile",
    "trainer/plan/searching",
    *(f"trainer/{room}" for room in TRAINER_ROOMS),
}
# The only modules of the launcher that need more than Python.
LAUNCHER_NEEDS = {"launch/targets/k8s_manifest.py": {"yaml"}}
CHECKED = (*MAY_IMPORT, "tests", "benchmarks")
VAGUE = {"utils", "util", "common", "misc", "helpers"}
MESH_AXES = {"replica", "data", "fsdp", "expert", "context", "tensor", "pipe"}


def sources(*packages: str) -> list[pathlib.Path]:
    return [path for p in packages for path in sorted((ROOT / p).glob("**/*.py"))]


def imports(path: pathlib.Path) -> set[str]:
    """Returns full names of absolute imports, and sibling packages as "..name"."""
    found = set()
    depth = len(path.relative_to(ROOT).parts)  # 2 in a package, 3 in a room
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level >= depth:
            names = [node.module] if node.module else [a.name for a in node.names]
            dots = "." * (node.level - depth + 2)
            found |= {f"{dots}{name.split('.')[0]}" for name in names}
    return found


def roots(path: pathlib.Path) -> set[str]:
    return {n.split(".")[0] for n in imports(path) if not n.startswith(".")}


def users(of: str, *packages: str) -> set[str]:
    return {str(p.relative_to(ROOT)) for p in sources(*packages) if of in roots(p)}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package):
    assert sources(package), package
    allowed = {f"..{name}" for name in MAY_IMPORT[package]}
    for path in sources(package):
        siblings = {name for name in imports(path) if name.startswith("..")}
        assert siblings <= allowed, (
            f"{path.relative_to(ROOT)} imports {siblings - allowed}"
        )


def test_the_library_imports_itself_relatively():
    # An absolute import would work, but pyright could not follow it by path.
    assert users("meshloom", *MAY_IMPORT) == set()


def test_nothing_imports_a_bare_directory():
    # `import sharding` works from the checkout and nowhere else, and would load a
    # second copy of the module.
    for path in sources(*CHECKED):
        bare = roots(path) & {*MAY_IMPORT}
        assert not bare, f"{path.relative_to(ROOT)}: write meshloom.{bare.pop()}"


def test_sharding_needs_jax_and_nothing_else():
    allowed = {"jax", "numpy", *sys.stdlib_module_names}
    for path in sources("sharding"):
        others = roots(path) - allowed
        assert not others, f"{path.relative_to(ROOT)} imports {others}"


def test_models_need_no_trainer_library():
    allowed = {"jax", "numpy", "flax", *sys.stdlib_module_names}
    for path in sources("models"):
        others = roots(path) - allowed
        assert not others, f"{path.relative_to(ROOT)} imports {others}"


def test_the_package_imports_nothing():
    # Otherwise importing one part would load the libraries of another.
    assert [imports(path) for path in sources("package")] == [set()]


def test_the_launcher_does_not_need_jax():
    # It must survive what kills a jax process.
    for path in sources("launch", "configs"):
        others = roots(path) - {*sys.stdlib_module_names}
        name = str(path.relative_to(ROOT))
        assert others == LAUNCHER_NEEDS.get(name, set()), f"{name} imports {others}"
        if others:  # inside the function that needs it: no other target has to load it
            tree = ast.parse(path.read_text())
            top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not others & {a.name for n in top for a in n.names}, name


def test_rooms_of_the_service_import_one_way():
    for room, allowed in SERVICE_ROOMS.items():
        for path in sources(f"service/{room}"):
            names = {
                part
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.ImportFrom) and node.level == 2
                for part in [(node.module or node.names[0].name).split(".")[0]]
            }
            assert names <= allowed, f"{path.relative_to(ROOT)} imports {names}"


def test_the_engine_and_the_coordinator_need_no_jax():
    allowed = {
        "rounds": set(),
        "blocks": {"numpy", "ml_dtypes"},
        "wire": {"numpy", "grpc", "google_crc32c"},
        "coordinator": {"numpy"},
    }
    for room, libraries in allowed.items():
        for path in sources(f"service/{room}"):
            others = roots(path) - libraries - {*sys.stdlib_module_names}
            assert not others, f"{path.relative_to(ROOT)} imports {others}"


def test_one_file_imports_gin():
    assert users("gin", *MAY_IMPORT) == {"trainer/config/files.py"}


def test_nothing_imports_jax_internals():
    for path in sources(*CHECKED):
        private = {n for n in imports(path) if f"{n}.".startswith("jax._src.")}
        assert not private, f"{path.relative_to(ROOT)} imports {private}"


def strings(path: pathlib.Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_models_name_logical_axes_only():
    for path in sources("models"):
        named = strings(path) & MESH_AXES
        assert not named, f"{path.relative_to(ROOT)} names mesh axes {named}"


def test_each_directory_is_one_package_and_its_rooms_are_known():
    for package in MAY_IMPORT:
        folders = {str(p.parent.relative_to(ROOT)) for p in sources(package)}
        assert folders <= {package, *ROOMS}, folders
        assert all((ROOT / f / "__init__.py").exists() for f in folders)


def test_files_are_short_and_have_specific_names():
    for path in sources(*CHECKED):
        num_lines = len(path.read_text().splitlines())
        name = path.relative_to(ROOT)
        assert num_lines <= 400, f"{name} has {num_lines} lines; split it"
        assert path.stem not in VAGUE, f"{name}: name what it is about"
