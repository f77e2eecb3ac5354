"""Preflight: compares all processes before the first step.

A job trains one program on one kind of machine. A host with another version, config,
corpus or clock makes it hang, or silently train something else. So processes report
twice: their environment right after joining, before anything that could hang; and their
data, program and folders once they are prepared. Any difference ends the job in all
processes, with one table that names the odd one out (see preflight_table.py).

Reports go through the group's store, so it does not matter if the devices differ.
"""

import dataclasses
import hashlib
import json
import platform
import shlex
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from ..config import tree as config_tree
from . import preflight_table
from .group import WAIT_SECONDS, Group, Report
from .preflight_folders import FolderProbe

if TYPE_CHECKING:
    from ..program.computation import Computation

# How long processes that have joined may take to import and to load their config.
ENVIRONMENT_SECONDS = 300.0
# How long they may take to open the data and to trace the step of a large model.
PROGRAM_SECONDS = 1800.0
FILE = "preflight.json"
DISTRIBUTIONS = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"),
    *("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "meshloom"),
)
# Settings that change what jax computes; environment variables can set them.
JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Long lists, of which the record keeps only a digest.
DIGESTED = ("config", "code")

Facts = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Record:
    """The reports of all processes, for the run folder.

    Attributes:
      processes: a report per process; empty in a group of one and in all processes but
        the first, since a thousand reports are too much to send to every process.
      seconds: how long the preflight took.
      mark: chosen by process 0, the same in all processes of this attempt.
    """

    processes: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0
    mark: str = ""

    def __add__(self, other: "Record") -> "Record":
        pairs = zip(self.processes, other.processes, strict=True)
        merged = tuple(a | b for a, b in pairs)
        return Record(merged, round(self.seconds + other.seconds, 3), self.mark)

    @property
    def hosts(self) -> list[str]:
        return [report["host"] for report in self.processes]

    def to_json(self) -> dict[str, Any]:
        return {"processes": self.processes, "seconds": self.seconds}


def check_environment(
    config: "Computation", group: Group, environ_flags: Mapping[str, str]
) -> Record:
    """Compares the environments of all processes; raises ValueError if they differ.

    Args:
      environ_flags: compiler flags from the environment, by variable.
    """
    if group.size == 1:
        return Record()
    facts = {
        "devices": {"kind": _kind(), "count": jax.local_device_count()},
        "versions": versions(),
        "config": config_tree.flatten(config),
        "code": code(config),
        **{name: flags(environ_flags.get(name, "")) for name in FLAGS},
        "jax": {name: jax.config.values[name] for name in JAX_SETTINGS},
    }
    if not group.met_at:
        group.wait("start", ENVIRONMENT_SECONDS)
    # Every process read its clock when they last met, so at the same time.
    return _compare(
        group, "environment check", facts, ENVIRONMENT_SECONDS, clock=group.met_at
    )


def check_program(
    data: Mapping[str, Any], program: str, group: Group, probe: FolderProbe
) -> Record:
    """Compares data, program and shared folders; raises ValueError if they differ.

    Args:
      data: the facts about the datasets.
      program: the fingerprint of the train step.
      probe: of the folders that all processes must share. Process 0 has already left
        its files, and all processes have met since.
    """
    if group.size == 1:
        return Record()
    facts = {
        "data": dict(data),
        "step": {"program": program},
    }
    probes = {}
    if not group.is_first:
        probe.leave()
        probes = probe.look()
    group.wait("prepared", PROGRAM_SECONDS)
    if group.is_first:
        probes = probe.look()
    return _compare(group, "program check", facts, WAIT_SECONDS, probes=probes)


def _compare(
    group: Group, what: str, facts: Facts, seconds: float, **more: Any
) -> Record:
    began = time.monotonic()
    report = {"host": socket.gethostname(), "address": _address(), "facts": facts}
    summaries: list[dict[str, Any]] = []

    def judge(reports: list[Report]) -> Report:
        summaries.extend(map(_summary, reports))
        mark = uuid.uuid4().hex[:12]
        return {"differences": preflight_table.render(reports), "mark": mark}

    answer = group.consult(what, report | more, judge, seconds)
    if answer["differences"]:
        raise ValueError(answer["differences"])
    seconds = round(time.monotonic() - began, 3)
    return Record(tuple(summaries), seconds, answer["mark"])


def _summary(report: dict[str, Any]) -> dict[str, Any]:
    facts = {
        group: digest(values) if group in DIGESTED else values
        for group, values in report["facts"].items()
    }
    clock = {"clock": report["clock"]} if "clock" in report else {}
    return {"host": report["host"], **clock, **facts}


def digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that matter."""
    installed = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def code(config: "Computation") -> dict[str, str]:
    """Returns a digest of each file of Meshloom and of the modules the config uses.

    Their names do not depend on where Meshloom is installed.
    """
    root = Path(__file__).parents[2]
    files = {
        path.relative_to(root).as_posix(): path
        for package in _packages(root)
        for pattern in ("**/*.py", "**/*.gin")
        for path in package.glob(pattern)
    }
    nodes = [value for _, value in config_tree.walk(config)]
    for module in sorted({type(x).__module__ for x in nodes if config_tree.is_node(x)}):
        file = getattr(sys.modules[module], "__file__", None)
        if file is not None and not module.startswith("meshloom."):
            files[module] = Path(file)
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for name, path in sorted(files.items())
    }


def _packages(root: Path) -> list[Path]:
    """Returns the folders of Meshloom's packages, such as sharding and trainer.

    In a checkout they lie beside that of `meshloom` itself, which has nothing else.
    """
    itself = Path(str(sys.modules["meshloom"].__file__)).parent
    found = (path.parent for path in root.glob("*/__init__.py"))
    return sorted(package for package in found if package != itself)


def flags(text: str) -> dict[str, str]:
    """Returns the values of flags by name, without those that only dump programs."""
    values = {}
    for flag in shlex.split(text):
        name, _, value = flag.partition("=")
        if not name.startswith("--xla_dump_"):
            values[name] = value or "set"
    return values


def _kind() -> str:
    device = jax.local_devices()[0]
    return f"{device.platform} {device.device_kind}"


def _address() -> str | None:
    """Returns the address that this host's name resolves to, which gloo advertises.

    None if collectives do not use gloo, or the name does not resolve.
    """
    if jax.default_backend() != "cpu":
        return None
    try:
        return socket.gethostbyname(socket.gethostname())
    except socket.gaierror:
        return None
