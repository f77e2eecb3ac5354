"""A source of image files: a folder with a folder per class."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .documents import Document, Split, split_key
from .optional import library
from .split_files import SplitFiles, some
from .splits import check_folder, check_positive, holdout_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFolder(SplitFiles):
    """Images in `path/CLASS/...`, or `path/SPLIT/CLASS/...` with split_names.

    It needs `pip install 'meshloom[images]'`. Examples are `image` [size, size,
    channels] from 0 to 1, and `label`. A hash of an image's name holds it out.

    Attributes:
      size: pixels on each side; other images are resized to it, without cropping.
      channels: 3 for colors, 1 for gray levels.
      classes: the names of the folders, in the order of their labels; None for all in
        `path`, sorted.
    """

    size: int
    channels: int = 3
    classes: tuple[str, ...] | None = None

    SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "size")
        if self.channels not in (1, 3):
            raise ValueError(
                f"ImageFolder: channels is {self.channels}; expected 3 or 1."
            )

    def open(self, split: Split) -> "Images":
        return self.open_documents(split, self.documents(split))

    def documents(self, split: Split) -> list[Document]:
        found = super().documents(split)
        if self.has_own(split):
            return found
        holdout = holdout_of(self)
        chosen = [x for x in found if holdout.split_of(split_key(x.name)) == split]
        if not chosen:
            raise ValueError(
                f"{self.what('path')}: split '{split}' is empty: a hash selects none "
                f"of {len(found)} images. Set {split}_path, another holdout, or add "
                "images."
            )
        return chosen

    def check_growing(self) -> None:
        """Raises ValueError if the settings exclude that files are added."""
        check_folder(self)
        if self.classes is None:
            raise ValueError(
                f"follow: {self.what('path')}: a new folder would change the labels. "
                "Name all classes in classes."
            )

    def open_documents(self, split: Split, files: Sequence[Document]) -> "Images":
        """Opens a split with these of its files, in this order."""
        classes = self.classes
        if classes is None:
            of_train = super().documents("train")  # the same for all splits
            classes = tuple(sorted({self._class_of(x, "train") for x in of_train}))
        labels = []
        for each in files:
            name = self._class_of(each, split)
            if name not in classes:
                raise ValueError(
                    f"{self.what('path')}: '{each.path}' is of class '{name}', which "
                    f"is not one of {some(classes)}. Add it to classes, or move it."
                )
            labels.append(classes.index(name))
        return Images(self, split, files, np.array(labels, np.int32), classes)

    def _class_of(self, document: Document, split: Split) -> str:
        folders = document.name.split("/")[:-1]
        if self.split_names:
            folders = folders[1:]
        if not folders:
            raise ValueError(
                f"{self.what('path')}: '{document.path}' is not in the folder of a "
                f"class. Move it to one, or name another path for split '{split}'."
            )
        return folders[0]


class Images:
    """The opened source; a file that cannot be decoded is an error when it is read."""

    unit = "images"

    def __init__(
        self,
        source: ImageFolder,
        split: Split,
        documents: Sequence[Document],
        labels: np.ndarray,
        classes: Sequence[str],
    ):
        self._what, self._split, self._source = source.what("path"), split, source
        self._documents, self._labels, self._classes = documents, labels, classes
        self._pillow = library("PIL.Image", what=self._what, extra="images")
        self._ops = library("PIL.ImageOps", what=self._what, extra="images")

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of a dataset of {len(self)} examples")
        return {"image": self._image(self._documents[i].path), "label": self._labels[i]}

    def _image(self, path: str) -> np.ndarray:
        size, channels = self._source.size, self._source.channels
        try:
            with self._pillow.open(path) as image:
                image = self._ops.exif_transpose(image)
                image = image.convert("RGB" if channels == 3 else "L")
                if image.size != (size, size):
                    how = self._pillow.Resampling.BILINEAR
                    image = image.resize((size, size), how)
                pixels = np.asarray(image, np.float32) / np.float32(255)
        except (OSError, ValueError, SyntaxError) as error:  # as Pillow raises them
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{self._what}: '{path}' cannot be decoded ({reason}). Replace it, or "
                "remove it."
            ) from error
        return pixels.reshape(size, size, channels)

    def files(self) -> Mapping[str, str]:
        return {each.name: each.path for each in self._documents}

    def describe(self) -> dict[str, Any]:
        source = self._source
        return {
            "source": "ImageFolder",
            "path": getattr(source, f"{self._split}_path", None) or source.path,
            "split": self._split,
            "num_classes": len(self._classes),
            "classes": some(list(self._classes)),
            "examples": len(self),
        }

    def loss_units(self, loss: float) -> dict[str, float]:
        del loss
        return {}
