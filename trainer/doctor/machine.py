"""Checks of the machine itself: packages, cores, memory, clock and devices."""

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .findings import Finding

# The jax plugins for accelerators.
PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin")
# Files that reveal an accelerator, whether jax can use it or not.
SIGNS = {
    "NVIDIA GPU": ("dev/nvidia[0-9]*", "proc/driver/nvidia/version"),
    "TPU": ("dev/accel[0-9]*", "dev/vfio/[0-9]*"),
}
EXTRAS = {"NVIDIA GPU": "cuda12", "TPU": "tpu"}
GIB = 2**30


def installed(distribution: str = "meshloom") -> Iterator[Finding]:
    """Checks Python and packages against the lower bounds in our metadata."""
    try:
        about = metadata.metadata(distribution)
    except metadata.PackageNotFoundError:
        remedy = "Run pip install meshloom, or make install in a checkout."
        yield Finding(distribution, "is not installed", "problem", remedy)
        return
    least = (about["Requires-Python"] or "").removeprefix(">=")
    version = ".".join(map(str, sys.version_info[:3]))
    yield _version("python", version, least, "Use a newer Python.")
    yield Finding(distribution, about["Version"])
    for line in metadata.requires(distribution) or []:
        requirement = re.match(r"([\w.-]+)(?:\[[^]]*\])?(?:>=([\w.]+))?", line)
        if requirement is None or "extra ==" in line:
            continue
        name, least = requirement[1], requirement[2] or ""
        remedy = f"pip install '{line}'"
        found = _installed(name)
        if found is None:
            yield Finding(name, "is not installed", "problem", remedy)
        else:
            yield _version(name, found, least, remedy)
    yield from _partners()


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version(name: str, found: str, least: str, remedy: str) -> Finding:
    if least and _numbers(found) < _numbers(least):
        text = f"{found}, older than {least}, the oldest tested version"
        return Finding(name, text, "warning", remedy)
    return Finding(name, found)


def _partners() -> Iterator[Finding]:
    """Checks that jaxlib and the plugins have the version of jax."""
    jax = _installed("jax")
    for name in ("jaxlib", *PLUGINS):
        found = _installed(name)
        if found is None:
            continue
        if name != "libtpu" and jax is not None and _numbers(found) != _numbers(jax):
            text = f"{found}, but jax is {jax}: the versions must match"
            yield Finding(name, text, "warning", f"pip install '{name}=={jax}'")
        else:
            yield Finding(name, found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def machine(root: Path = Path("/")) -> Iterator[Finding]:
    """Checks cores, memory and clock."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    yield Finding("cores", f"{usable} of {cores} usable by this process")
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        amounts = dict(re.findall(r"(\w+): +(\d+) kB", meminfo.read_text()))
        total, free = (int(amounts[k]) * 1024 for k in ("MemTotal", "MemAvailable"))
        limit = root / "sys/fs/cgroup/memory.max"
        text = limit.read_text().strip() if limit.exists() else "max"
        summary = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
        if text.isdigit() and int(text) < total:
            summary += f"; container limit {int(text) / GIB:.1f} GiB"
        if free < GIB:
            remedy = "Stop other programs: jax alone needs about half a GiB."
            yield Finding("memory", summary, "warning", remedy)
        else:
            yield Finding("memory", summary)
    yield _clock()


def _clock(now: float | None = None) -> Finding:
    """Checks the clock: logs and TLS certificates depend on it."""
    now = time.time() if now is None else now
    made = Path(__file__).stat().st_mtime
    summary = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < made:
        summary += ", before this program was installed"
        return Finding("clock", summary, "warning", "Set the clock, ideally with NTP.")
    return Finding("clock", summary)


def accelerators(root: Path = Path("/")) -> list[str]:
    """Returns the kinds of accelerators that the system reports."""
    return [
        kind
        for kind, patterns in SIGNS.items()
        if any(True for pattern in patterns for _ in root.glob(pattern))
    ]


def devices(
    probed: dict[str, Any], environ: Mapping[str, str], root: Path = Path("/")
) -> Iterator[Finding]:
    """Checks the devices that jax sees, as reported by the probe."""
    present = accelerators(root)
    if error := probed.get("error"):
        yield Finding("devices", f"jax cannot start: {error}", "problem", _fix(error))
        return
    summary = f"{probed['count']} {probed['kind']} ({probed['platform']})"
    if not present or probed["platform"] != "cpu":
        yield Finding("devices", summary)
        return
    summary = f"{summary}, but this machine has a {' and a '.join(present)}"
    if platforms := environ.get("JAX_PLATFORMS"):
        remedy = f"JAX_PLATFORMS={platforms} requests it: unset it to use the other."
        yield Finding("devices", summary, "warning", remedy)
        return
    extra = EXTRAS[present[0]]
    remedy = f"make train EXTRA={extra}, or pip install 'meshloom[{extra}]'"
    yield Finding("devices", summary, "problem", remedy)


def _fix(error: str) -> str:
    if "XLA_FLAGS" in error:
        return "Remove the flag from XLA_FLAGS, or use this jax version's spelling."
    if "no response" in error:
        return (
            "A driver or another program may hold the accelerator: stop programs that "
            "use it, try JAX_PLATFORMS=cpu, or wait longer with --seconds."
        )
    return (
        "Run python -c 'import jax; print(jax.devices())' for the full error. Usually "
        "package versions do not match: run make install in a new environment."
    )
