"""The service reads JSON and raw bytes, and nothing that could run code."""

import ast
import pathlib

import pytest

SERVICE = pathlib.Path(__file__).parents[2] / "service"
MODULES = {
    *("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "copyreg"),
    *("jax.export", "jax.experimental.serialize_executable", "multiprocessing"),
}
CALLS = {"eval", "exec", "__import__", "import_module", "load", "loads", "unpickle"}
ALLOWED = {"json.loads"}


def unsafe(source: str) -> list[str]:
    """Returns what in a module could run code that somebody has sent."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            is_unsafe = called.rpartition(".")[2] in CALLS and called not in ALLOWED
            if is_unsafe and not called.startswith(("self.", "super().")):
                found.append(called)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += ["allow_pickle"] * (ast.unparse(node.value) != "False")
        prefixes = tuple(f"{module}." for module in MODULES)
        found += [x for x in names if x in MODULES or x.startswith(prefixes)]
    return found


@pytest.mark.parametrize(
    "path", sorted(SERVICE.rglob("*.py")), ids=lambda p: str(p.relative_to(SERVICE))
)
def test_a_module_reads_nothing_that_runs_code(path):
    assert unsafe(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import jax.export",
        "from jax import export",
        "np.load(file, allow_pickle=True)",
        "cloudpickle.loads(data)",
        "eval(text)",
    ],
)
def test_what_would_be_unsafe_is_found(source):
    assert unsafe(source)
