"""Pipeline parallelism in SPMD: schedules as data, and one program that runs them."""

import sys
import types

from . import picture as picture
from .executor import Pipeline as Pipeline
from .order import layer_order as layer_order
from .order import reorder as reorder
from .schedule import Schedule as Schedule
from .schedule import make as make
from .simulate import Simulation as Simulation
from .simulate import Sizes as Sizes
from .simulate import best_microbatches as best_microbatches
from .simulate import compare as compare
from .simulate import simulate as simulate
from .stack import Stack as Stack


class _Package(types.ModuleType):
    """Explains the mistake to users who call this package as if it were a plan."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            "meshloom.sharding.pipeline is the package of pipeline schedules, not a "
            "plan. The plan that shards layers over the pipe axis is "
            "meshloom.sharding.pipe(), or 'pipeline' in parse_plan('data+pipeline')."
        )


sys.modules[__name__].__class__ = _Package
