"""The installed package: one name, its version, types, and independent parts."""

import importlib.metadata
import pathlib
import subprocess
import sys

import meshloom
import meshloom.sharding

IMPORTED = """
import sys
import jax, jax.experimental.mesh_utils, jax.extend.core
before = {name.split(".")[0] for name in sys.modules}
import meshloom.sharding, meshloom.sharding.pipeline
print(sorted({name.split(".")[0] for name in sys.modules} - before))
"""


def test_the_version_is_that_of_the_distribution():
    assert meshloom.__version__ == importlib.metadata.version("meshloom")


def test_the_package_is_marked_as_typed():
    assert meshloom.__file__ is not None
    assert (pathlib.Path(meshloom.__file__).parent / "py.typed").exists()


def test_the_sharding_library_imports_jax_and_nothing_else(tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout
    others = set(eval(out)) - set(sys.stdlib_module_names) - {"meshloom"}
    assert not others, others
