"""The preflight: before the first step, all processes compare what they will run.

A job trains one program on one kind of machine. A host with another version, config,
corpus or clock makes it hang, or train something else without a word. So each process
reports twice: right after joining what it is, before anything that could hang; and when
it has prepared, what it is about to do. Any difference ends the job in all processes
with one table that names who is odd (see table.py).

Reports go through jax's store of keys and values, and need no devices that agree.
"""

import dataclasses
import hashlib
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from ..config import tree as config_tree
from . import joining, preflight_folders, preflight_table

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
    """What all processes have said, for the run folder.

    Empty where there is one process, and in all others than process 0: what a
    thousand processes say is much to send to each of them.
    """

    processes: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0

    def __add__(self, other: "Record") -> "Record":
        pairs = zip(self.processes, other.processes, strict=True)
        merged = tuple(a | b for a, b in pairs)
        return Record(merged, round(self.seconds + other.seconds, 3))

    @property
    def hosts(self) -> list[str]:
        return [report["host"] for report in self.processes]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def who_we_are(config: "Computation") -> Record:
    """The first round: what each process is. Raises where they differ."""
    if jax.process_count() == 1:
        return Record()
    facts = {
        "devices": {"kind": _kind(), "count": jax.local_device_count()},
        "versions": versions(),
        "config": config_tree.flatten(config),
        "code": code(config),
        **{name: flags(os.environ.get(name, "")) for name in FLAGS},
        "jax": {name: jax.config.values[name] for name in JAX_SETTINGS},
    }
    joining.wait_for_all("preflight", FIRST_SECONDS)
    # All clocks are read at this moment, which the barrier has made the same.
    return _call("preflight", facts, FIRST_SECONDS, clock=time.time())


def what_we_do(
    data: Mapping[str, Any], program: str, folders: Mapping[str, Path]
) -> Record:
    """The second round: data, program and folders. Raises where they differ.

    Args:
      data: what the datasets are.
      program: the fingerprint of the step.
      folders: by what they are for; all processes must see the same ones.
    """
    if jax.process_count() == 1:
        return Record()
    facts = {
        "data": dict(data),
        "step": {"program": program},
    }
    joining.wait_for_all("prepared", SECOND_SECONDS)
    probes = preflight_folders.probe(folders)
    return _call("prepared", facts, joining.WAIT_SECONDS, probes=probes)


def _call(what: str, facts: Facts, seconds: float, **more: Any) -> Record:
    began = time.monotonic()
    report = {"host": socket.gethostname(), "address": _address(), "facts": facts}
    heard: list[dict[str, Any]] = []

    def judge(reports: list[dict[str, Any]]) -> dict[str, Any]:
        heard.extend(map(_short, reports))
        return {"words": preflight_table.render(reports)}

    answer = joining.consult(what, report | more, judge, seconds)
    if answer["words"]:
        raise ValueError(answer["words"])
    return Record(tuple(heard), round(time.monotonic() - began, 3))


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
    """Of Python and of what we stand on; what is not installed is not there."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code(config: "Computation") -> dict[str, str]:
    """A digest of each file of Meshloom, and of the modules that the config uses.

    Names do not depend on where it is installed.
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
    """Flags by name: their order does not matter, nor where XLA dumps its programs."""
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
    """Of this host by its own name, which gloo tells the other processes.

    None where collectives go another way than by gloo, or the name has no address.
    """
    if jax.default_backend() != "cpu":
        return None
    try:
        return socket.gethostbyname(socket.gethostname())
    except socket.gaierror:
        return None
