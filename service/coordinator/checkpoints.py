"""Checkpoints of the service: what all servers saved of one version.

`service/VERSION/` has a file per block, written by the servers, and `manifest.json`,
written last by the coordinator: without it the folder is not a checkpoint. Any number
of servers can load one, so the folder must be on a disk that all of them see.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .run_files import replace_json

MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is complete.

    Attributes:
      cut: number of the log entry whose event led to this version.
      files: the size in bytes of each file of the servers.
    """

    folder: Path
    version: int
    cut: int
    layout: str
    files: Mapping[str, int]

    def check(self) -> None:
        """Raises a ValueError that names the first file that is missing or torn."""
        for name, size in self.files.items():
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{path} is missing")
            if (found := path.stat().st_size) != size:
                raise ValueError(f"{path} has {found} bytes, expected {size}")


class Checkpoints:
    """The checkpoints of one job.

    Args:
      check: called before files change; raises an error if they must not.
    """

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None):
        self.folder, self._check = folder, check

    def prepare(self, version: int) -> Path:
        """Returns an empty folder for the servers to save a version into."""
        self._check()
        folder = self.folder / str(version)
        if folder.exists():
            # Of an abandoned history, or cut short. The manifest goes first, so that
            # a kill never leaves a manifest without its files.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def complete(self, version: int, cut: int, layout: str, about: Any) -> Checkpoint:
        """Writes the manifest, which makes the folder a checkpoint."""
        folder = self.folder / str(version)
        paths = sorted(p for p in folder.rglob("*") if p.is_file())
        files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in paths}
        manifest = {
            **{"version": version, "cut": cut, "layout": layout},
            **{"files": files, "about": about},
        }
        self._check()
        replace_json(folder / MANIFEST, manifest)
        return Checkpoint(folder, version, cut, layout, files)

    def find(self) -> tuple[list[Checkpoint], list[str]]:
        """Returns the complete checkpoints, newest first, and why others are not."""
        found: list[Checkpoint] = []
        faults: list[str] = []
        for folder in self._folders():
            try:
                found.append(_read(folder))
            except ValueError as error:
                faults.append(str(error))
        return found, faults

    def keep(self, versions: Iterable[int]) -> None:
        """Deletes every other checkpoint, and what was left of unfinished ones."""
        self._check()
        wanted = set(versions)
        for folder in self._folders():
            if int(folder.name) not in wanted:
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder)

    def _folders(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        folders = [p for p in self.folder.iterdir() if p.is_dir() and p.name.isdigit()]
        return sorted(folders, key=lambda folder: int(folder.name), reverse=True)


def _read(folder: Path) -> Checkpoint:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        checkpoint = Checkpoint(
            folder=folder,
            version=manifest["version"],
            cut=manifest["cut"],
            layout=manifest["layout"],
            files=manifest["files"],
        )
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the save was not completed") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a manifest ({error!r})") from error
    checkpoint.check()
    return checkpoint
