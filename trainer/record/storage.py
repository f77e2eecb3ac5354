"""Where checkpoints lie: in a folder, or in a bucket, through the same code.

Paths are those of etils.epath, which orbax uses too: a folder of this system, or
gs://BUCKET/... in Google Cloud Storage. Orbax can write arrays to no other store.
"""

import importlib.util
from pathlib import Path
from typing import Any

from etils import epath


def location(folder: Any) -> epath.Path:
    """The path of a folder, absolute or in a bucket."""
    path = epath.Path(folder)
    if not is_remote(path):
        return epath.Path(Path(path).absolute())
    import fsspec.config

    # What was listed before is no proof of what is there now.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return path


def is_remote(path: Any) -> bool:
    return "://" in str(path)


def check(checkpoint_folder: str | None) -> None:
    """Raises ValueError for a setting that cannot work."""
    if checkpoint_folder is None:
        return
    scheme, found, _ = checkpoint_folder.partition("://")
    if not found and not Path(checkpoint_folder).is_absolute():
        raise ValueError(
            f"checkpoint_folder is {checkpoint_folder!r}; expected a folder with its "
            "whole path, as the run is looked into from other places too"
        )
    if found and scheme != "gs":
        raise ValueError(
            f"checkpoint_folder is {checkpoint_folder!r}; expected a folder or "
            f"gs://BUCKET/...: orbax can write arrays to no {scheme}:// store. Mount "
            "it as a folder."
        )


def check_installed(checkpoint_folder: str | None) -> None:
    """Raises ValueError where the package for a bucket is missing."""
    if checkpoint_folder is None or not is_remote(checkpoint_folder):
        return
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(
            f"checkpoint_folder {checkpoint_folder!r} needs the package gcsfs: "
            "pip install 'meshloom[gcs]'"
        )


def checkpoints_of(run: Path, checkpoint_folder: str | None) -> epath.Path:
    """Where a run saves, by its setting."""
    return location(checkpoint_folder or run / "checkpoints")
