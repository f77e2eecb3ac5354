"""Locations of checkpoints: a folder or a bucket, through the same code.

Paths are etils.epath paths, as in orbax: a folder of the local file system, or
gs://BUCKET/... in Google Cloud Storage. Orbax cannot write arrays to other stores.
"""

import importlib.util
from pathlib import Path
from typing import Any

from etils import epath


def location(folder: Any) -> epath.Path:
    """Returns the absolute path of a folder, or its path in a bucket."""
    path = epath.Path(folder)
    if not is_remote(path):
        return epath.Path(Path(path).absolute())
    import fsspec.config

    # A cached listing does not show what is there now.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return path


def is_remote(path: Any) -> bool:
    return "://" in str(path)


def check(checkpoint_folder: str | None) -> None:
    """Raises ValueError for a checkpoint_folder that cannot work."""
    if checkpoint_folder is None:
        return
    scheme, separator, _ = checkpoint_folder.partition("://")
    if not separator and not Path(checkpoint_folder).is_absolute():
        raise ValueError(
            f"checkpoint_folder is {checkpoint_folder!r}; expected an absolute path, "
            "because the run is also read from other working directories"
        )
    if separator and scheme != "gs":
        raise ValueError(
            f"checkpoint_folder is {checkpoint_folder!r}; expected a folder or "
            f"gs://BUCKET/...: orbax cannot write arrays to a {scheme}:// store. Mount "
            "it as a folder."
        )


def check_installed(checkpoint_folder: str | None) -> None:
    """Raises ValueError if the package for buckets is missing."""
    if checkpoint_folder is None or not is_remote(checkpoint_folder):
        return
    if importlib.util.find_spec("gcsfs") is None:
        raise ValueError(
            f"checkpoint_folder {checkpoint_folder!r} needs the package gcsfs: "
            "pip install 'meshloom[gcs]'"
        )


def checkpoints_of(run: Path, checkpoint_folder: str | None) -> epath.Path:
    """Returns where a run saves its checkpoints."""
    return location(checkpoint_folder or run / "checkpoints")
