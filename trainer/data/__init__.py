"""Data: sources, documents, packing, shuffling, batches on the devices.

Configs name the sources as `data.Text`, `data.ArrayRecords` and `data.Synthetic`.
Nothing here imports jax; `data.batches` does.
"""

from .shuffle import Order as Order
from .sources import ArrayRecords as ArrayRecords
from .sources import Dataset as Dataset
from .sources import Source as Source
from .sources import Synthetic as Synthetic
from .sources import Text as Text
from .sources import throughput_unit as throughput_unit
