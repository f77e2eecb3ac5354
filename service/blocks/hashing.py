"""Which server holds which block: rendezvous hashing.

Every server has a score for every block, and the highest score wins. A server that
leaves gives up only its own blocks, and one that joins takes only those it wins.
"""

import hashlib
from collections.abc import Sequence

from .layout import Layout
from .tables import Table


def owner(key: str, servers: Sequence[str]) -> str:
    """Returns the server that holds the block with this key."""
    if not servers:
        raise ValueError(f"block {key}: there are no servers; start at least one")
    return max(servers, key=lambda server: (_score(key, server), server))


def owners(layout: Layout, job: str, servers: Sequence[str]) -> dict[int, str]:
    """Returns {block index: server} of a job."""
    return {
        block.index: owner(f"{job}/{block.index}", servers) for block in layout.blocks
    }


def table_owners(table: Table, job: str, servers: Sequence[str]) -> dict[int, str]:
    """Returns {block index: server} of a table of a job."""
    blocks = range(len(table.layout.blocks))
    return {block: owner(table.key(job, block), servers) for block in blocks}


def _score(key: str, server: str) -> bytes:
    # A length before the name, so that no two pairs give the same text.
    text = f"{len(server)}:{server}{key}".encode()
    return hashlib.blake2b(text, digest_size=8).digest()
