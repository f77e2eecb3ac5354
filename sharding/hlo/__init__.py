"""Reads compiled programs: collectives, loops, FLOPs and bytes from optimized HLO."""

from .loops import executions as executions
from .program import Groups as Groups
from .program import flops as flops
from .program import product_flops as product_flops
from .program import replica_groups as replica_groups
from .program import source_target_pairs as source_target_pairs
from .program import unknown_loop as unknown_loop
from .text import parse as parse
