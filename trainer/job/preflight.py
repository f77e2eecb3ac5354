"""Preflight: before the first step, all processes report what they are.

A job trains one program on one kind of machine. A host with another version, config,
corpus or clock makes it hang, or silently train something else. So each process reports
twice: right after joining what it is, before anything that could hang; and once it has
prepared, what it is about to do. Any difference ends the job in all processes, with one
table that names the odd one out (see preflight_table.py).

Reports go through the group's store: the devices need not agree.
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

# How long processes that have joined may take to import and to read their config.
FIRST_SECONDS = 300.0
# To open the data and to trace the step of a large model.
SECOND_SECONDS = 1800.0
FILE = "preflight.json"
PACKAGES = ("configs", "launch", "models", "sharding", "trainer")
DISTRIBUTIONS = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"),
    *("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "meshloom"),
)
# Settings of jax that change what it computes; environment variables can set them.
JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Long lists, which the record keeps as one digest each.
DIGESTED = ("config", "code")

Facts = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Record:
    """What all processes have reported, for the run folder.

    Attributes:
      processes: empty in a group of one and in all processes but the first: the reports
        of a thousand processes are too much to send to each of them.
      mark: made by process 0, the same in all processes of this attempt.
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


def who_we_are(
    config: "Computation", group: Group, environ_flags: Mapping[str, str]
) -> Record:
    """Runs the first round: what each process is. Raises ValueError if they differ.

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
        group.wait("start", FIRST_SECONDS)
    # All clocks were read when the processes last met, at the same moment.
    return _call(group, "who we are", facts, FIRST_SECONDS, clock=group.met_at)


def what_we_do(
    data: Mapping[str, Any], program: str, group: Group, probe: FolderProbe
) -> Record:
    """Runs the second round: data, program and folders. Raises if they differ.

    Args:
      data: what the datasets are.
      program: the fingerprint of the step.
      probe: of the folders that all must see; process 0 has left its files, and all
        have met since.
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
    group.wait("prepared", SECOND_SECONDS)
    if group.is_first:
        probes = probe.look()
    return _call(group, "what we do", facts, WAIT_SECONDS, probes=probes)


def _call(group: Group, what: str, facts: Facts, seconds: float, **more: Any) -> Record:
    began = time.monotonic()
    report = {"host": socket.gethostname(), "address": _address(), "facts": facts}
    heard: list[dict[str, Any]] = []

    def judge(reports: list[Report]) -> Report:
        heard.extend(map(_short, reports))
        mark = uuid.uuid4().hex[:12]
        return {"differences": preflight_table.render(reports), "mark": mark}

    answer = group.consult(what, report | more, judge, seconds)
    if answer["differences"]:
        raise ValueError(answer["differences"])
    seconds = round(time.monotonic() - began, 3)
    return Record(tuple(heard), seconds, answer["mark"])


def _short(report: dict[str, Any]) -> dict[str, Any]:
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
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code(config: "Computation") -> dict[str, str]:
    """Returns a digest of each file of Meshloom and of the modules the config uses.

    The names do not depend on where it is installed.
    """
    root = Path(__file__).parents[2]
    files = {
        path.relative_to(root).as_posix(): path
        for package in PACKAGES
        for pattern in ("**/*.py", "**/*.gin")
        for path in (root / package).glob(pattern)
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


def flags(text: str) -> dict[str, str]:
    """Returns flags by name; their order and where XLA dumps programs do not matter."""
    found = {}
    for word in shlex.split(text):
        name, _, value = word.partition("=")
        if not name.startswith("--xla_dump_"):
            found[name] = value or "set"
    return found


def _kind() -> str:
    device = jax.local_devices()[0]
    return f"{device.platform} {device.device_kind}"


def _address() -> str | None:
    """Returns the address of this host's own name, which gloo tells the others.

    None if collectives do not use gloo, or the name has no address.
    """
    if jax.default_backend() != "cpu":
        return None
    try:
        return socket.gethostbyname(socket.gethostname())
    except socket.gaierror:
        return None
