"""Sharding rules as a library: mesh, rules, resolver, plans. Depends on jax only."""

from .audit import audit as audit
from .idle import idle_axes as idle_axes
from .lint import lint as lint
from .logical_axes import axes_for_state as axes_for_state
from .logical_axes import axes_from_paths as axes_from_paths
from .logical_axes import axes_of as axes_of
from .mesh import MeshSpec as MeshSpec
from .plans import context as context
from .plans import data as data
from .plans import fsdp as fsdp
from .plans import parse_plan as parse_plan
from .plans import pipe as pipe
from .plans import sequence as sequence
from .plans import tensor as tensor
from .plans import tensor2d as tensor2d
from .rules import Rules as Rules
from .sharder import Sharder as Sharder
from .tree import Resolved as Resolved
from .tree import diff as diff
from .tree import resolve as resolve
