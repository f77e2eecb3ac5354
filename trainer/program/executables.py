"""Compiled programs of a run, kept in its folder for the next start.

jax's own cache does not serve CPU jobs of several processes: only process 0 finds its
programs there. So each process keeps what it has compiled in a file of its own, which
the next attempt loads instead of compiling.

A program is served only for exactly what it was compiled from: the lowered program,
the compiler's options and flags, the versions, the kind of machine, and the place of
this process in the job. Loading unpickles, so a file must be this user's own and have
the digest that it was written with. Whatever keeps a file from being used is said in
one line, and the program is compiled anew.
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
        """Returns the program, loaded if an attempt before has compiled the same.

        Args:
          name: of the program, in messages and in its file's name.
          lowered: as jax.jit(f).lower(...) gives it.
          options: of the compiler.
        """
        options = dict(options or {})
        if self._folder is None:
            return lowered.compile(compiler_options=options)
        file = self._folder / f"{name.replace(' ', '-')}-{self._process[0]}"
        key = self._key(lowered, options)
        header, payload = self._read(name, file)
        if header.get("key") == key:
            if reason := header.get("reason"):
                self._say(_anew(name, reason))
                return lowered.compile(compiler_options=options)
            found = self._load(name, payload)
            if found is not None:
                self._say(f"Loaded from an earlier attempt: {name}")
                return found
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
        """The header and the program of a file; ({}, b"") without one to trust."""
        try:
            about = os.stat(file)
            if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o022:
                raise ValueError("others may have written it")
            first, _, payload = file.read_bytes().partition(b"\n")
            header = json.loads(first)
            if header["sha256"] != hashlib.sha256(payload).hexdigest():
                raise ValueError("it is not what was written")
            return header, payload
        except FileNotFoundError:
            return {}, b""
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._say(f"The {name} is compiled anew: {file} cannot be used ({error})")
            return {}, b""

    def _load(self, name: str, payload: bytes) -> Any:
        try:
            return serialize_executable.deserialize_and_load(*pickle.loads(payload))
        except Exception as error:  # of pickle, jax and XLA, of many types
            reason = str(error).split("\n")[0][:200]
            self._say(f"The {name} is compiled anew: it cannot be loaded ({reason})")
            return None

    def _write(self, name: str, file: Path, key: str, compiled: Any) -> None:
        reason, payload = _why_not(compiled), b""
        if not reason:
            try:
                payload = pickle.dumps(serialize_executable.serialize(compiled))
            except (ValueError, NotImplementedError) as error:
                reason = str(error)
        if reason:
            self._say(_anew(name, reason))
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


def _why_not(compiled: Any) -> str:
    """Why a program must not be loaded from a file; "" where it may be."""
    pair = order.unordered(compiled.as_text())
    if pair is None:
        return ""
    return (
        f"in a loaded program nothing keeps the collectives of {pair[0]} and {pair[1]} "
        "in order"
    )


def _anew(name: str, reason: str) -> str:
    return f"The {name} is compiled at every start: {reason}"


def _cpu() -> str:
    """What this machine's processor can do; its code may not run on another."""
    if not CPU_INFO.exists():
        return platform.processor()
    lines = CPU_INFO.read_text().split("\n\n")[0].splitlines()
    kept = ("vendor_id", "model", "flags", "Features", "stepping")
    return "\n".join(line for line in lines if line.startswith(kept))
