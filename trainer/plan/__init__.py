"""What a run will cost, before any accelerator is rented: see docs/plan.md.

A `Forecast` is what one step of a config costs on a target. Two models of a step's cost
live here, and each answers a question of its own:

  the closed form  (predict.py and what it imports) "what would this config cost?" It
                   needs shapes, rules and the model's `costs()` only, takes
                   milliseconds, and so can rank thousands of candidates. `plan`,
                   `--search`, `--smallest`, `--scale` and the forecast of a run use it.
  the walk         (compile/program.py) "what does this compiled program cost?" It
                   reads the optimized HLO of one program, ours or another's, and
                   accounts for every instruction and what overlaps. `--compile` uses it
                   to check the closed form, after the minutes that a compiler takes.

They share the devices (program/hardware.py), the links of mesh axes and the time of a
collective on them (links.py). The numbers that the closed form owes to compilers are in
fitted.py.
"""

from ..program.hardware import parse_target as parse_target


def __getattr__(name: str):
    # A target is parsed in no time; only forecasts need jax and the model's shapes.
    if name in ("forecast", "Forecast"):
        from . import predict

        return getattr(predict, name)
    if name in ("search", "Search"):
        from .searching import searching

        return getattr(searching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
