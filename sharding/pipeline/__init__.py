"""Pipeline parallelism in SPMD: schedules as data, and one program that runs them."""

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
