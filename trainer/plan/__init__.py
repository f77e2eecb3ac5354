"""What a run will cost, before any accelerator is rented: see docs/plan.md."""

from ..program.hardware import Device as Device
from ..program.hardware import Target as Target
from ..program.hardware import parse_target as parse_target


def __getattr__(name: str):
    # Peaks of devices are read by light modules; only plans need the model's shapes.
    if name in ("plan", "Plan"):
        from . import predict

        return getattr(predict, name)
    if name in ("search", "Search"):
        from .searching import searching

        return getattr(searching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
