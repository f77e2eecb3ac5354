"""Copies blocks from one server to another, with all that belongs to them.

That is: the versions that are kept, the exact parameters, the optimizer state, and the
contributions that have arrived in whole and are not committed yet. Both servers are at
the same version, and no commit happens meanwhile: the coordinator sees to it, and the
version is checked.

For each block there is a JSON message that says what follows, and then the bytes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from ..wire import messages
from ..wire.calls import Channel
from ..wire.errors import Refused, Unavailable
from .block_files import plain
from .store import BlockStore
from .versions import read_only

CHUNK = 2 << 20
# Commits wait while blocks are fetched: not long for a server that is silent, and less
# than the coordinator waits for an answer.
SILENT_SECONDS, FETCH_SECONDS = 10.0, 240.0

# Arrays of a block, each with what it is.
Parts = list[tuple[dict[str, Any], np.ndarray]]


def fetch(
    store: BlockStore, channel: Channel, message: dict[str, Any]
) -> Iterator[int]:
    """Takes over blocks from another server, yields each, and closes the channel.

    Args:
      message: says which blocks, see BlockServer.copy.
    """
    with contextlib.closing(channel):
        stream = channel.download("Copy", message, SILENT_SECONDS, limit=FETCH_SECONDS)
        yield from decode(store, stream)


def encode(store: BlockStore, version: int, blocks: Sequence[int]) -> Iterator[bytes]:
    """Yields what `decode` reads; refuses blocks that are not here at this version."""
    dropped = store.staging.dropped()
    yield messages.encode({"version": version, "dropped": dropped})
    for block in blocks:
        parts = _parts_of(store, block, version)
        rows = [[about, array.dtype.name, list(array.shape)] for about, array in parts]
        data = b"".join(plain(np.ascontiguousarray(x)).tobytes() for _, x in parts)
        header = {"block": block, "parts": rows, "nbytes": len(data)}
        header["crc32c"] = google_crc32c.value(data)
        yield messages.encode(header)
        for first in range(0, len(data), CHUNK):
            yield data[first : first + CHUNK]


def decode(store: BlockStore, stream: Iterator[bytes]) -> Iterator[int]:
    """Takes over blocks; yields each once it has arrived intact."""
    first = messages.decode(_next(stream))
    store.staging.note_dropped(first["dropped"])
    for message in stream:
        header = messages.decode(message)
        data = bytearray()
        while len(data) < header["nbytes"]:
            data += _next(stream)
        if google_crc32c.value(bytes(data)) != header["crc32c"]:
            raise Unavailable(
                f"block {header['block']} of another server arrived damaged"
            )
        parts = _arrays(header["parts"], data)
        _take_over(store, header["block"], first["version"], parts)
        yield header["block"]


def _parts_of(store: BlockStore, block: int, version: int) -> Parts:
    with store.commit_lock:
        if store.newest != version or block not in store.owned:
            raise Refused(
                f"block {block} at version {version} is not here; the newest version "
                f"is {store.newest}"
            )
        parts: Parts = [
            ({"version": number}, array)
            for number in store.versions.numbers()
            for array in store.versions[number][block]
        ]
        published = store.versions[version][block]
        exact = store.chain.exact(block, published)
        if exact is not published:
            parts += [({"exact": True}, array) for array in exact]
        leaves = jax.tree.leaves(store.opt_states[block])
        parts += [({"opt_state": True}, np.asarray(leaf)) for leaf in leaves]
        for key in store.staging.keys():
            staged = store.staging.get(key)
            if staged is not None and staged.missing([block]) is None:
                parts += [
                    ({"key": key, "slab": slab, "start": start}, array)
                    for slab, start, array in staged.pieces_of(block)
                ]
    return parts


def _take_over(store: BlockStore, block: int, version: int, parts: Parts) -> None:
    versions: dict[int, tuple[np.ndarray, ...]] = {}
    for about, array in parts:
        if "version" in about:
            slabs = versions.get(about["version"], ())
            versions[about["version"]] = (*slabs, read_only(array))
    opt_state = [array for about, array in parts if "opt_state" in about]
    exact = tuple(read_only(array) for about, array in parts if "exact" in about)
    with store.commit_lock:
        if store.newest != version or block not in store.accepted:
            raise Refused(
                f"block {block} at version {version} is not expected here; the newest "
                f"version is {store.newest}"
            )
        for about, array in parts:
            if "key" in about:
                key, slab, start = about["key"], about["slab"], about["start"]
                store.staging.add(tuple(key), block, slab, start, array)
        store.adopt(block, versions, opt_state, exact)


def _next(stream: Iterator[bytes]) -> bytes:
    message = next(stream, None)
    if message is None:
        raise Unavailable("the stream of another server's blocks broke off")
    return message


def _arrays(rows: Sequence[Any], data: bytearray) -> Parts:
    parts, position = [], 0
    for about, name, shape in rows:
        dtype = jnp.dtype(name)
        # Copied, so that it is aligned, and freed when the block moves on.
        array = np.ndarray(tuple(shape), dtype, buffer=data, offset=position).copy()
        parts.append((about, array))
        position += array.nbytes
    return parts
