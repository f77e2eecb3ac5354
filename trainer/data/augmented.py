"""Images that training sees shifted, turned, scaled or mirrored, new in every epoch."""

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from .documents import Split
from .sources import Dataset, Source, check_split, open_source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmented:
    """Another source, whose training images are changed at random.

    The change is a function of (seed, sample, epoch), so it depends on no mesh and no
    interruption. The eval and test splits are those of the source.

    Attributes:
      source: has an array `image` [height, width, channels]; what comes from outside
        of an image is 0.
      shift: by up to so many pixels along each side.
      rotate: by up to so many degrees, either way.
      zoom: by a factor of up to 1 + zoom, either way.
      flip: whether half of the images are mirrored, left to right.
    """

    source: Source
    seed: int = 0
    shift: float = 0.0
    rotate: float = 0.0
    zoom: float = 0.0
    flip: bool = False

    def __post_init__(self):
        for name in ("seed", "shift", "rotate", "zoom"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"Augmented: {name} must be >= 0, got {getattr(self, name)}"
                )

    def open(self, split: Split) -> Dataset:
        check_split(self, split)
        dataset = open_source(self.source, split)
        return AugmentedDataset(self, dataset) if split == "train" else dataset


class AugmentedDataset:
    """The training split of an `Augmented` source; `[i]` is the image unchanged."""

    def __init__(self, settings: Augmented, dataset: Any):
        self._settings, self._dataset = settings, dataset
        for name in ("unit", "units_per_example", "files"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        found = dataset[0].get("image")
        if found is None or found.ndim != 3 or found.dtype.kind != "f":
            what = "no array" if found is None else f"{found.dtype}{list(found.shape)}"
            raise ValueError(
                f"Augmented: the source {type(settings.source).__name__} has {what} "
                "'image'; expected floating-point pixels [height, width, channels]."
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self._dataset[i]

    def example(self, i: int, epoch: int) -> dict[str, np.ndarray]:
        own = getattr(self._dataset, "example", None)
        found = own(i, epoch) if own else self._dataset[i]
        c = self._settings
        draw = np.random.default_rng([c.seed, int(i), int(epoch)])
        down, right, turn, scale = draw.uniform(-1, 1, 4)
        image = found["image"]
        if c.flip and draw.random() < 0.5:
            image = image[:, ::-1]
        image = moved(
            image,
            (c.shift * down, c.shift * right),
            math.radians(c.rotate * turn),
            (1 + c.zoom) ** scale,
        )
        return found | {"image": image}

    def describe(self) -> dict[str, Any]:
        """Returns those of the source; the digest is of the settings too."""
        about = self._dataset.describe()
        changes = {
            field.name: getattr(self._settings, field.name)
            for field in dataclasses.fields(self._settings)
            if field.name != "source"
        }
        if "digest" in about:
            content = f"augmented 1 {about['digest']} {sorted(changes.items())}"
            about = about | {"digest": hashlib.sha256(content.encode()).hexdigest()}
        return about | {"augmented": True}

    def loss_units(self, loss: float) -> dict[str, float]:
        return self._dataset.loss_units(loss)


def moved(
    image_HWC: np.ndarray, shift: tuple[float, float], angle: float, zoom: float
) -> np.ndarray:
    """Returns an image turned and scaled about its center, then shifted.

    Args:
      shift: pixels down and to the right.
      angle: in radians.
    """
    H, W, _ = image_HWC.shape
    center = np.array([(H - 1) / 2, (W - 1) / 2])
    there = np.moveaxis(np.indices((H, W)), 0, -1) - center - np.array(shift)
    cos, sin = math.cos(angle) / zoom, math.sin(angle) / zoom
    here = there @ np.array([[cos, -sin], [sin, cos]]) + center
    corner = np.floor(here).astype(int)
    share = here - corner
    result = np.zeros(image_HWC.shape)
    # Bilinear: the four pixels around the place where each one comes from.
    for down in (0, 1):
        for right in (0, 1):
            row, column = corner[..., 0] + down, corner[..., 1] + right
            inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
            weight = np.abs(1 - down - share[..., 0]) * np.abs(
                1 - right - share[..., 1]
            )
            pixels = image_HWC[row.clip(0, H - 1), column.clip(0, W - 1)]
            result += (weight * inside)[..., None] * pixels
    return result.astype(image_HWC.dtype)
