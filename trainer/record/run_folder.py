"""The folder of a run: its lock, the config it was started with, its files."""

import contextlib
import errno
import fcntl
import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from etils import epath

from ...launch.atomic_file import replace_text
from ...launch.masking import masked_text
from ..config.tree import (
    ABSENT,
    Change,
    at_default,
    diff,
    flatten,
    format_diff,
    is_below,
    read_run,
)
from .invocation import Invocation
from .save_errors import SaveFailed
from .storage import checkpoints_of

CONFIG_JSON, CONFIG_GIN = "config.json", "config.gin"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class RunFolder:
    """A run folder. Only one process of a job, the writer, creates or changes it."""

    def __init__(self, path: Path, *, is_writer: bool = True):
        self.path = Path(path)
        self.is_writer = is_writer

    @property
    def checkpoints(self) -> epath.Path:
        """Where the run saves, according to the config it was started with."""
        values = self.previous_values() or {}
        return checkpoints_of(self.path, values.get("checkpoint_folder"))

    def previous_values(self) -> dict[str, Any] | None:
        """Returns the flat config of the folder, None for a new folder."""
        return read_run(self.path) if (self.path / CONFIG_JSON).exists() else None

    def check(
        self, config: Any, *, free: tuple[str, ...], insist: bool
    ) -> list[Change]:
        """Compares a config with the one the folder was started with; writes nothing.

        A field that the folder does not have was added by a later version, and the run
        was trained with its default.

        Args:
          free: fields that may differ, because they change how the run is computed but
            not what it computes.
          insist: accept any difference.

        Returns:
          The differences.
        """
        previous = self.previous_values()
        if previous is None:
            return []
        defaults = at_default(config)
        changes = [
            change
            for change in diff(previous, flatten(config))
            if not (change.old is ABSENT and change.path in defaults)
        ]
        hard = [change for change in changes if not is_below(change.path, free)]
        if hard and not insist:
            count = (
                "1 value differs" if len(hard) == 1 else f"{len(hard)} values differ"
            )
            raise ValueError(
                f"run folder {self.path} was started with a different config "
                f"({count}). Choose another --workdir, or pass --insist to continue it "
                f"with the new values:\n{format_diff(hard)}"
            )
        return changes

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Creates and locks the folder; a second run in it is an error.

        In a multi-process job only the writer locks it.
        """
        if not self.is_writer:
            yield
            return
        lock = self._take_lock()
        try:
            self._check_files()
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, SaveFailed) or not _is_full_disk(error):
                raise
            message = os.strerror(errno.ENOSPC)
            raise OSError(errno.ENOSPC, message, str(self.path)) from error
        finally:
            os.close(lock)  # closing releases the lock

    def _take_lock(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            reason = error.strerror
            if isinstance(error, FileExistsError | NotADirectoryError):
                reason = "it, or a parent, is a file"
            raise ValueError(
                f"run folder {self.path} cannot be written: {reason}. Choose another "
                "--workdir, or make this one a writable folder."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 100).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise ValueError(
                f"run folder {self.path} is in use by another process ({holder}). Wait "
                "for it, stop it, or choose another --workdir."
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {platform.node()}\n".encode())
        return lock

    def _check_files(self) -> None:
        """Raises early if the run could not append to one of its files."""
        for path in sorted(self.path.glob("*.jsonl")):
            try:
                with open(path, "ab"):
                    pass
            except OSError as error:
                raise ValueError(
                    f"{path} cannot be written: {error.strerror}. Make it writable, "
                    "remove it, or choose another --workdir."
                ) from error

    def write_config(self, document: Mapping[str, Any], text: str) -> None:
        self.write_json(CONFIG_JSON, document)
        self.write_text(CONFIG_GIN, text)

    def write_json(self, name: str, document: Any) -> None:
        self.write_text(name, json.dumps(document, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        if self.is_writer:
            replace_text(self.path / name, text)

    def remove(self, name: str) -> None:
        """Removes a file that is no longer valid."""
        if self.is_writer:
            (self.path / name).unlink(missing_ok=True)


def _is_full_disk(error: Exception) -> bool:
    """Recognizes an OSError, and orbax's ValueError that quotes its message."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOSPC
    return os.strerror(errno.ENOSPC) in str(error)


def environment(
    mesh_sizes: Mapping[str, int], num_processes: int, invocation: Invocation
) -> dict[str, Any]:
    """Describes what the run runs on, for the report and for whoever asks later."""
    import jax

    device = jax.devices()[0]
    return {
        "command": invocation.command,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: metadata.version(name) for name in (*PACKAGES, "meshloom")},
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": jax.device_count(),
        "num_processes": num_processes,
        "mesh": ", ".join(f"{k}={v}" for k, v in mesh_sizes.items() if v > 1) or "1",
        "xla_flags": masked_text(invocation.flags.get("XLA_FLAGS", "")),
    }
