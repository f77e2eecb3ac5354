"""Imports of libraries that only some sources need."""

import importlib
from typing import Any


def library(module: str, *, what: str, extra: str) -> Any:
    """Returns a module, or raises ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{what}: {module}, which reads it, cannot be imported ({error}). Install "
            f"it: pip install 'meshloom[{extra}]'"
        ) from error
