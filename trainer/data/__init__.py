"""Data: from text files to batches on the devices.

The path of a batch: `sources` opens a split, `documents` finds and splits its files,
`packing` cuts their tokens into examples, `shuffle` orders the examples, and `batches`
reads the rows of a step and places them on the devices.

Configs name the sources as `data.Text`, `data.ArrayRecords`, `data.Synthetic`,
`data.Digits` and, around another one, `data.Augmented`.
Importing this package does not import jax; `data.batches` does.
"""

from .augmented import Augmented as Augmented
from .images import Arrays as Arrays
from .images import Digits as Digits
from .shuffle import Order as Order
from .sources import ArrayRecords as ArrayRecords
from .sources import Dataset as Dataset
from .sources import Source as Source
from .sources import Synthetic as Synthetic
from .sources import Text as Text
from .sources import throughput_unit as throughput_unit
