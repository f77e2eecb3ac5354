"""Which servers hold which block: rendezvous hashing.

Every server has a score for every block, and the highest scores win. A server that
leaves gives up only its own blocks, and one that joins takes only those it wins.
"""

import hashlib
from collections.abc import Sequence

from .layout import Layout
from .tables import Table


def ranked(key: str, servers: Sequence[str], copies: int) -> tuple[str, ...]:
    """Returns the servers that hold the block with this key, the first one first."""
    if not servers:
        raise ValueError(f"block {key}: there are no servers; start at least one")
    by_score = sorted(servers, key=lambda s: (_score(key, s), s), reverse=True)
    return tuple(by_score[:copies])


def holders(
    layout: Layout, job: str, servers: Sequence[str], copies: int
) -> dict[int, tuple[str, ...]]:
    """Returns {block index: its servers} of a job; fewer than `copies` if need be."""
    return {
        block.index: ranked(f"{job}/{block.index}", servers, copies)
        for block in layout.blocks
    }


def owners(layout: Layout, job: str, servers: Sequence[str]) -> dict[int, str]:
    """Returns {block index: its first server} of a job."""
    found = holders(layout, job, servers, copies=1)
    return {block: first for block, (first,) in found.items()}


def table_owners(table: Table, job: str, servers: Sequence[str]) -> dict[int, str]:
    """Returns {block index: server} of a table of a job."""
    blocks = range(len(table.layout.blocks))
    return {block: ranked(table.key(job, block), servers, 1)[0] for block in blocks}


def _score(key: str, server: str) -> bytes:
    # A length before the name, so that no two pairs give the same text.
    text = f"{len(server)}:{server}{key}".encode()
    return hashlib.blake2b(text, digest_size=8).digest()
