"""Compiled programs of a run, stored in its folder for the next start.

jax's own compilation cache does not work for multi-process CPU jobs: only process 0
gets cache hits. So each process stores what it has compiled in a file of its own, and
the next attempt loads it instead of compiling.

A stored program is used only if everything it was compiled from is the same: the
lowered program, the compiler's options and flags, the versions, the kind of machine,
and this process's index in the job. Loading unpickles, so the file must belong to this
user and match the digest it was written with. If a file cannot be used, one line says
why, and the program is compiled again.
"""

import hashlib
import json
import os
import pickle
import platform
import stat
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from ...launch import atomic_file
from ...sharding.hlo import order

FOLDER = "executables"
CPU_INFO = Path("/proc/cpuinfo")


class Executables:
    """The compiled programs of this process.

    Args:
      folder: of the run; None keeps nothing, and always compiles.
      process: the index of this process and the number of processes.
      flags: of the compiler and the runtime, from the environment.
      say: told why a program is compiled at every start.
    """

    def __init__(
        self,
        folder: Path | None,
        say: Callable[[str], None] = print,
        *,
        process: tuple[int, int] = (0, 1),
        flags: Mapping[str, str] | None = None,
    ):
        self._folder = None if folder is None else folder / FOLDER
        self._say, self._process, self._flags = say, process, dict(flags or {})

    @property
    def are_kept(self) -> bool:
        return self._folder is not None

    def compile(
        self, name: str, lowered: Any, options: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns the program, loaded if an earlier attempt has compiled the same one.

        Args:
          name: of the program, for messages and its file name.
          lowered: the result of jax.jit(f).lower(...).
          options: compiler options.
        """
        options = dict(options or {})
        if self._folder is None:
            return lowered.compile(compiler_options=options)
        file = self._folder / f"{name.replace(' ', '-')}-{self._process[0]}"
        key = self._key(lowered, options)
        header, payload = self._read(name, file)
        if header.get("key") == key:
            if reason := header.get("reason"):
                self._say(_not_stored(name, reason))
                return lowered.compile(compiler_options=options)
            loaded = self._load(name, payload)
            if loaded is not None:
                self._say(f"Loaded from an earlier attempt: {name}")
                return loaded
        compiled = lowered.compile(compiler_options=options)
        self._write(name, file, key, compiled)
        return compiled

    def _key(self, lowered: Any, options: Mapping[str, Any]) -> str:
        """Returns a digest of all that a compiled program depends on."""
        device = jax.local_devices()[0]
        facts = {
            "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
            "options": {name: repr(value) for name, value in options.items()},
            "versions": [*map(metadata.version, ("jax", "jaxlib")), sys.version],
            "flags": self._flags,
            "device": [
                device.platform,
                device.device_kind,
                device.client.platform_version,
            ],
            "machine": [platform.machine(), _cpu()],
            "process": self._process,
            "devices": [[d.id, d.process_index] for d in jax.devices()],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _read(self, name: str, file: Path) -> tuple[dict[str, Any], bytes]:
        """Returns the header and program of a file, ({}, b"") if it is not usable."""
        try:
            about = os.stat(file)
            if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o022:
                raise ValueError("other users may have written it")
            first, _, payload = file.read_bytes().partition(b"\n")
            header = json.loads(first)
            if header["sha256"] != hashlib.sha256(payload).hexdigest():
                raise ValueError("its digest does not match")
            return header, payload
        except FileNotFoundError:
            return {}, b""
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._say(f"The {name} is compiled again: {file} cannot be used ({error})")
            return {}, b""

    def _load(self, name: str, payload: bytes) -> Any:
        try:
            return serialize_executable.deserialize_and_load(*pickle.loads(payload))
        except Exception as error:  # pickle, jax and XLA raise many types
            reason = str(error).split("\n")[0][:200]
            self._say(f"The {name} is compiled again: it cannot be loaded ({reason})")
            return None

    def _write(self, name: str, file: Path, key: str, compiled: Any) -> None:
        reason, payload = _unsafe_reason(compiled), b""
        if not reason:
            try:
                payload = pickle.dumps(serialize_executable.serialize(compiled))
            except (ValueError, NotImplementedError) as error:
                reason = str(error)
        if reason:
            self._say(_not_stored(name, reason))
        digest = hashlib.sha256(payload).hexdigest()
        header = json.dumps({"key": key, "sha256": digest, "reason": reason})
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with atomic_file.replacing(file, draft_name=f"{file.name}.new") as draft:
                with open(os.open(draft, mode, 0o600), "wb") as output:
                    output.write(header.encode() + b"\n" + payload)
        except OSError as error:  # it would only have saved time
            self._say(f"The {name} cannot be kept in {file}: {error.strerror}")


def _unsafe_reason(compiled: Any) -> str:
    """Returns why a program must not be loaded from a file, "" if it may be."""
    pair = order.unordered(compiled.as_text())
    if pair is None:
        return ""
    return (
        "in a loaded program nothing guarantees the order of the collectives in "
        f"{pair[0]} and {pair[1]}"
    )


def _not_stored(name: str, reason: str) -> str:
    return f"The {name} is compiled at every start: {reason}"


def _cpu() -> str:
    """Returns the model and features of this CPU, for which the code is compiled."""
    if not CPU_INFO.exists():
        return platform.processor()
    lines = CPU_INFO.read_text().split("\n\n")[0].splitlines()
    kept = ("vendor_id", "model", "flags", "Features", "stepping")
    return "\n".join(line for line in lines if line.startswith(kept))
