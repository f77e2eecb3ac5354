"""Only the command line reads the environment, exits, or asks jax who we are.

A library that did could not run twice in one process, nor be told by its caller.
"""

import ast
import pathlib

from paths import ROOT

COMMAND_LINE = ("trainer/cli.py", "trainer/warm.py", "trainer/commands/")
PER_PROCESS = {"os.environ", "os.getenv", "os._exit", "sys.argv", "sys.exit"}
HOOKS = {"sys.excepthook", "sys.unraisablehook", "threading.excepthook"}
HOOKS |= {"sys.displayhook", "logging.basicConfig", "logging.disable", "signal.signal"}
JAX = {"jax.process_index", "jax.process_count", "jax.config.update"}
# Each with its reason; one that is no longer needed must be removed.
ALLOWED = {
    # Programs of their own, started by the library as subprocesses.
    "trainer/doctor/probe.py": {"sys.argv"},
    "trainer/plan/compile/worker.py": {"sys.argv", "jax.config.update"},
    # Environments of the subprocesses that they start.
    "trainer/plan/compile/compiled.py": {"os.environ"},
    "trainer/verify/certify.py": {"os.environ"},
    "trainer/verify/drill_job.py": {"os.environ"},
    "trainer/verify/fleet_job.py": {"os.environ"},
    # Joining a job is a setting of the whole process, made once by the command line.
    "trainer/job/joining.py": {"jax.process_count", "jax.config.update"},
    # The default for library users, who may pass a Group of their own.
    "trainer/job/group.py": {"jax.process_count", "jax.process_index"},
    # Where the rows of a global array lie is a fact about jax's devices.
    "sharding/placing.py": {"jax.process_count"},
    # Requests to stop, while a block runs.
    "trainer/job/preemption.py": {"signal.signal"},
    # What threads of orbax print long after the call that started them.
    "trainer/checkpoint/quiet.py": {"sys.excepthook", "sys.unraisablehook"},
    # The compilation cache, off while a program is compiled that must not come from it.
    "trainer/program/uncached.py": {"jax.config.update"},
}


def uses(source: str) -> set[str]:
    names = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
    }
    return names & (PER_PROCESS | HOOKS | JAX)


def library() -> list[pathlib.Path]:
    packages = ("sharding", "models", "service", "trainer")
    files = (path for p in packages for path in sorted((ROOT / p).glob("**/*.py")))
    return [p for p in files if not name(p).startswith(COMMAND_LINE)]


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_library_is_told_and_does_not_ask():
    found = {name(path): uses(path.read_text()) for path in library()}
    assert {path: names for path, names in found.items() if names} == ALLOWED


def test_uses_are_found():
    source = "import os\ndef f():\n    os._exit(1)\n    return os.environ['A']\n"
    assert uses(source) == {"os._exit", "os.environ"}
    assert uses("import jax\nx = jax.process_index() + 1") == {"jax.process_index"}
