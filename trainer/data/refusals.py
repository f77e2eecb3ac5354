"""Refusals by a user's own classes, which the command line shows in one line."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def refusals_of(node: Any, method: str) -> Iterator[None]:
    """Names the class and the method in a ValueError of a class of the user's own.

    Methods such as `open` and `check_batch` raise a ValueError for what does not fit.
    From elsewhere it would be taken for a bug, shown in full, and the job restarted.
    """
    try:
        yield
    except ValueError as error:
        name = type(node)
        if name.__module__.startswith("meshloom."):
            raise
        raise ValueError(f"{name.__name__}.{method}: {error}") from error
