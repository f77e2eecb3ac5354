"""The smallest number of devices of a kind on which a config trains."""

from typing import TYPE_CHECKING

from ...program.hardware import Target, sizes_of
from .searching import Progress, Search, search

if TYPE_CHECKING:
    from ...run.train import Config


def smallest(
    config: "Config",
    target: Target,
    *,
    batch: int | None = None,
    more_than: int = 0,
    progress: Progress | None = None,
) -> Search | None:
    """Searches one usual size after the other; None where the largest is too small.

    Args:
      target: any number of devices of the kind.
      batch: batch_size instead of the config's; it is the same at every size.
      more_than: sizes up to this are known to be too small.
    """
    for size in sizes_of(target):
        if size.num_devices > more_than:
            found = search(config, size, batch=batch, progress=progress)
            if found.best is not None:
                return found
    return None


def in_words(found: Search | None, target: Target) -> str:
    if found is None:
        return f"It fits on no usual number of {target.device.name}."
    num = found.target.num_devices
    devices = f"{num} device{'s' if num > 1 else ''}"
    return f"The smallest on which it trains is {found.target.name}: {devices}."
