"""Run by `make wheel-test` where the wheel was installed without its dependencies.

The programs of the documentation run there with jax, and each with its own library.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import meshloom
import meshloom.sharding

DOCS = pathlib.Path(__file__).parents[2] / "docs"
JAX = {"jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy", "meshloom"}
EQUINOX = {"equinox", "jaxtyping", "wadler_lindig", "typing_extensions"}
OPTAX = {"optax", "absl"}
# What flax brings with itself, orbax among it.
FLAX = {"flax", "orbax", "tensorstore", "etils", "msgpack", "yaml", "rich", "treescope"}
FLAX |= {"aiofiles", "humanize", "nest_asyncio", "google", "simplejson", "psutil"}
FLAX |= {"typing_extensions", "pygments", "markdown_it", "mdurl", "fsspec", "uvloop"}
FLAX |= {"prometheus_client", "importlib_resources", "zipp"}
# (page, which of its programs, what it may import beside jax)
PROGRAMS = [
    ("own_model.md", 0, set()),
    ("own_model.md", 1, EQUINOX | OPTAX),
    ("own_model.md", 2, FLAX | OPTAX),
    ("sharding.md", 0, set()),
    ("audit.md", 0, set()),
]
TIMEOUT = 240  # seconds; a program takes about 4 on a quiet machine

# Hides libraries that are installed, and belong to other programs.
HIDING = """
import sys

class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"{{name}} is not there", name=name)

sys.meta_path.insert(0, Hiding())
"""


def program(page: str, number: int) -> str:
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[number]


def run(page: str, number: int, allowed: set[str]) -> list[str]:
    hidden = set(importlib.metadata.packages_distributions()) - JAX - allowed
    script = HIDING.format(hidden=hidden) + program(page, number)
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            # Threads for all devices to wait in (two cores have too few).
            env={**os.environ, "NPROC": "32"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    assert result.returncode == 0, f"{page}, program {number}\n{result.stderr}"
    return result.stdout.splitlines()


def check_training(lines: list[str]) -> None:
    numbers = re.fullmatch(r"loss (\S+) \(one device (\S+)\) to (\S+)", lines[-2])
    assert numbers, lines[-2]
    first, alone, last = map(float, numbers.groups())
    assert first == alone, lines[-2]  # to the four digits that are printed
    assert last < 0.8 * first, lines[-2]
    sharded = {"P('tensor', 'fsdp')", "P('fsdp', 'tensor')"}
    assert lines[-1].split(" is ")[1] in sharded, lines[-1]
    assert any(line.startswith("all-gather  fsdp ") for line in lines), lines


def main() -> None:
    assert "site-packages" in str(meshloom.__file__), meshloom.__file__
    assert "site-packages" in str(meshloom.sharding.__file__)
    typed = pathlib.Path(str(meshloom.__file__)).with_name("py.typed")
    assert typed.exists(), typed
    for name in ("grain", "gin"):  # what only the trainer needs
        assert importlib.util.find_spec(name) is None, name
    for page, number, allowed in PROGRAMS:
        lines = run(page, number, allowed)
        if page == "own_model.md":
            check_training(lines)
        print(f"{page}, program {number}: passed", flush=True)
    try:
        run("own_model.md", 1, set())
    except AssertionError as error:
        assert "equinox is not there" in str(error)
    else:
        raise AssertionError("programs see libraries that are not theirs")
    print(f"alone: {len(PROGRAMS)} passed, 0 failed")


if __name__ == "__main__":
    main()
