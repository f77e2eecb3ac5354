"""Boxes: n-dimensional ranges of the elements of an array, in its own coordinates."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Box:
    """The elements with start[i] <= index along dimension i < stop[i]."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self):
        pairs = zip(self.start, self.stop, strict=False)
        if len(self.start) != len(self.stop) or not all(0 <= a <= b for a, b in pairs):
            raise ValueError(
                f"box {list(self.start)} to {list(self.stop)}: expected as many starts "
                "as stops, with 0 <= start <= stop"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Returns the box of all elements of an array."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def at(cls, start: Sequence[int], shape: Sequence[int]) -> "Box":
        """Returns the box of this shape that begins at `start`."""
        if len(start) != len(shape):
            raise ValueError(
                f"box at {list(start)} of shape {list(shape)}: expected as many starts "
                "as dimensions"
            )
        stop = tuple(a + n for a, n in zip(start, shape, strict=True))
        return cls(tuple(start), stop)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Returns the elements that are in both; None if there are none."""
        if len(self.start) != len(other.start):
            raise ValueError(
                f"boxes of {len(self.start)} and {len(other.start)} dimensions cannot "
                "intersect"
            )
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def contains(self, other: "Box") -> bool:
        return len(self.start) == len(other.start) and all(
            a <= c and d <= b
            for a, b, c, d in zip(
                self.start, self.stop, other.start, other.stop, strict=True
            )
        )

    def slices(self, inside: "Box | None" = None) -> tuple[slice, ...]:
        """Returns the index of this box in an array of the elements of `inside`."""
        origin = inside.start if inside is not None else (0,) * len(self.start)
        return tuple(
            slice(a - o, b - o)
            for a, b, o in zip(self.start, self.stop, origin, strict=True)
        )

    def __str__(self) -> str:
        pairs = zip(self.start, self.stop, strict=True)
        return "[" + ", ".join(f"{a}:{b}" for a, b in pairs) + "]"
