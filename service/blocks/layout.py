"""How the parameters are divided into blocks: the unit that a server holds.

A *leaf* is one array of the parameters, in the order of the model (`[layer, ...]`),
whatever mesh a learner has. A *slab* is a box of a leaf. A *block* has one slab of a
large leaf, or several small leaves. Every element is in exactly one slab.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .box import Box
from .dtypes import dtype_of

Granularity = Literal["element", "matrix", "leaf"]
BLOCK_BYTES = 4 << 20
# Dimensions that stack separate parameters: layers, and dimensions without a name.
STACKED = ("layer", None)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the parameters: its path, shape, dtype and logical axes."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]

    def __post_init__(self):
        dtype_of(self.dtype)
        if len(self.axes) != len(self.shape):
            raise ValueError(
                f"{self.path}: {len(self.axes)} logical axes {self.axes} for the shape "
                f"{self.shape}; expected one per dimension (None for one without name)"
            )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Slab:
    """A box of the leaf with this index."""

    leaf: int
    box: Box


@dataclasses.dataclass(frozen=True)
class Block:
    index: int
    slabs: tuple[Slab, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """All leaves and all blocks of a job.

    Attributes:
      fragments: the fragment of each block; the blocks of a fragment are exchanged
        together.
    """

    leaves: tuple[Leaf, ...]
    blocks: tuple[Block, ...]
    fragments: tuple[int, ...]

    def __post_init__(self):
        _check(self)

    @property
    def num_fragments(self) -> int:
        return max(self.fragments, default=0) + 1

    def fragment_of(self, block: int) -> int:
        return self.fragments[block]

    def block_bytes(self, block: int) -> int:
        return _nbytes(self.blocks[block].slabs, self.leaves)

    @functools.cached_property
    def slabs_of(self) -> tuple[tuple[tuple[int, int, Box], ...], ...]:
        """For every leaf: its slabs as (block index, slab index in the block, box)."""
        found: list[list[tuple[int, int, Box]]] = [[] for _ in self.leaves]
        for block in self.blocks:
            for i, slab in enumerate(block.slabs):
                found[slab.leaf].append((block.index, i, slab.box))
        return tuple(map(tuple, found))

    @functools.cached_property
    def digest(self) -> str:
        """Hexadecimal digest: equal for layouts that can work together."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "leaves": [
                [x.path, list(x.shape), x.dtype, list(x.axes)] for x in self.leaves
            ],
            "blocks": [
                [[s.leaf, list(s.box.start), list(s.box.stop)] for s in block.slabs]
                for block in self.blocks
            ],
            "fragments": list(self.fragments),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Layout":
        try:
            leaves = tuple(
                Leaf(path, tuple(shape), dtype, tuple(axes))
                for path, shape, dtype, axes in data["leaves"]
            )
            blocks = tuple(
                Block(
                    i, tuple(Slab(s[0], Box(tuple(s[1]), tuple(s[2]))) for s in slabs)
                )
                for i, slabs in enumerate(data["blocks"])
            )
            return cls(leaves, blocks, tuple(data["fragments"]))
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"layout: not what Layout.to_json writes ({error!r}); do learners and "
                "servers have the same version of meshloom?"
            ) from error


def make_layout(
    leaves: Sequence[Leaf],
    *,
    granularity: Granularity = "element",
    block_bytes: int = BLOCK_BYTES,
    fragments: int = 1,
) -> Layout:
    """Divides leaves into blocks.

    Args:
      granularity: where a large leaf may be divided: "element" anywhere, "matrix" only
        between the entries of stacks (for optimizers that look at whole matrices),
        "leaf" nowhere.
      block_bytes: the size up to which small leaves share a block and above which a
        leaf is divided. With several fragments it is lowered to half a fragment's
        share, so that a small model has a block for each.
      fragments: in how many groups the blocks are exchanged.
    """
    if granularity not in ("element", "matrix", "leaf"):
        raise ValueError(
            f"granularity {granularity!r}: expected 'element', 'matrix' or 'leaf'"
        )
    if block_bytes < 1 or fragments < 1:
        raise ValueError(
            f"block_bytes={block_bytes}, fragments={fragments}: both must be >= 1"
        )
    if fragments > 1:
        share = sum(leaf.nbytes for leaf in leaves) // (2 * fragments)
        block_bytes = max(1, min(block_bytes, share))
    large: list[list[Slab]] = []
    small: list[Slab] = []
    for i, leaf in enumerate(leaves):
        if leaf.nbytes > block_bytes:
            boxes = _divide(leaf, granularity, block_bytes)
            large += [[Slab(i, box)] for box in boxes]
        else:
            small.append(Slab(i, Box.whole(leaf.shape)))
    groups = large + _fuse(small, leaves, block_bytes)
    groups.sort(key=lambda slabs: (slabs[0].leaf, slabs[0].box.start))
    if len(groups) < fragments:
        raise ValueError(
            f"fragments={fragments}, but the parameters have only {len(groups)} blocks "
            f"with granularity {granularity!r}: set fragments <= {len(groups)}"
        )
    blocks = tuple(Block(i, tuple(slabs)) for i, slabs in enumerate(groups))
    sizes = [_nbytes(block.slabs, leaves) for block in blocks]
    return Layout(tuple(leaves), blocks, _deal(sizes, fragments))


def _nbytes(slabs: Sequence[Slab], leaves: Sequence[Leaf]) -> int:
    return sum(s.box.size * dtype_of(leaves[s.leaf].dtype).itemsize for s in slabs)


def _divide(leaf: Leaf, granularity: Granularity, limit: int) -> list[Box]:
    """Returns boxes of at most `limit` bytes where the granularity allows it."""
    boxes = [Box.whole(leaf.shape)]
    itemsize = dtype_of(leaf.dtype).itemsize
    for dim, name in enumerate(leaf.axes):
        if granularity == "leaf" or (granularity == "matrix" and name not in STACKED):
            continue
        if max(box.size for box in boxes) * itemsize <= limit:
            break
        boxes = [part for box in boxes for part in _along(box, dim, limit // itemsize)]
    return boxes


def _along(box: Box, dim: int, limit: int) -> list[Box]:
    """Divides a box along one dimension into parts of about equal size."""
    length = box.shape[dim]
    rows = max(1, limit // (box.size // length))  # per part, at most
    num = -(-length // rows)
    bounds = [box.start[dim] + i * length // num for i in range(num + 1)]

    def part(a: int, b: int) -> Box:
        start, stop = list(box.start), list(box.stop)
        start[dim], stop[dim] = a, b
        return Box(tuple(start), tuple(stop))

    return [part(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def _fuse(
    small: Sequence[Slab], leaves: Sequence[Leaf], limit: int
) -> list[list[Slab]]:
    """Groups slabs, in their order, into blocks of at most `limit` bytes."""
    groups: list[list[Slab]] = []
    room = 0
    for slab in small:
        nbytes = _nbytes([slab], leaves)
        if not groups or nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(slab)
        room -= nbytes
    return groups


def _deal(sizes: Sequence[int], num: int) -> tuple[int, ...]:
    """Returns a fragment for each block: strided, and about equal in bytes.

    Of every `num` blocks in a row each fragment gets one, the emptiest fragment the
    largest. So no two fragments ever differ by more than the largest block.
    """
    fragments = [0] * len(sizes)
    loads = [0] * num
    for first in range(0, len(sizes), num):
        row = range(first, min(first + num, len(sizes)))
        largest_first = sorted(row, key=lambda i: -sizes[i])
        emptiest_first = sorted(range(num), key=lambda f: loads[f])
        for i, fragment in zip(largest_first, emptiest_first, strict=False):
            fragments[i] = fragment
            loads[fragment] += sizes[i]
    return tuple(fragments)


def _check(layout: Layout) -> None:
    """Raises ValueError unless the slabs fit the leaves and cover each exactly once."""
    if len(layout.fragments) != len(layout.blocks):
        raise ValueError(
            f"layout: {len(layout.fragments)} fragments for {len(layout.blocks)} "
            "blocks; expected one for each"
        )
    paths = [leaf.path for leaf in layout.leaves]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"layout: two leaves have the path {twice!r}")
    covered = [0] * len(layout.leaves)
    starts: set[tuple[int, tuple[int, ...]]] = set()
    for block in layout.blocks:
        for slab in block.slabs:
            leaf = layout.leaves[slab.leaf]
            is_new = (slab.leaf, slab.box.start) not in starts
            if not is_new or not Box.whole(leaf.shape).contains(slab.box):
                raise ValueError(
                    f"layout: block {block.index} has {leaf.path}{slab.box}, which is "
                    f"outside of the shape {leaf.shape} or in another block too"
                )
            starts.add((slab.leaf, slab.box.start))
            covered[slab.leaf] += slab.box.size
    for leaf, size in zip(layout.leaves, covered, strict=True):
        if size != math.prod(leaf.shape):
            raise ValueError(
                f"layout: the blocks have {size} elements of {leaf.path}, whose shape "
                f"{leaf.shape} has {math.prod(leaf.shape)}"
            )
