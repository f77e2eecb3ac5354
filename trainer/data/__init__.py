"""Data: from files to batches on the devices.

The path of a batch: `sources` opens a split, `documents` finds and splits its files,
`packing` cuts their tokens into examples, `shuffle` orders the examples, and `batches`
reads the rows of a step and places them on the devices.

Rows of arrays and tables have no documents: `rows` makes examples of them, `tables`
says which belong to a split.

Configs name the sources as `data.Text`, `data.ArrayRecords`, `data.ArrayFiles`,
`data.Csv`, `data.Parquet`, `data.HuggingFace`, `data.ImageFolder`,
`data.Synthetic`, `data.PlantedMatrix`, `data.PlantedChoices`, `data.PlantedClicks` and
`data.Digits`; `data.Mixture` draws from several, and
`data.Augmented` changes the images of one.
Importing this package does not import jax; `data.batches` does.
"""

from .array_files import ArrayFiles as ArrayFiles
from .array_files import Csv as Csv
from .augmented import Augmented as Augmented
from .image_folder import ImageFolder as ImageFolder
from .images import Arrays as Arrays
from .images import Digits as Digits
from .mixture import Mixture as Mixture
from .orders import order_of as order_of
from .parquet import HuggingFace as HuggingFace
from .parquet import Parquet as Parquet
from .planted import PlantedMatrix as PlantedMatrix
from .planted_clicks import PlantedChoices as PlantedChoices
from .planted_clicks import PlantedClicks as PlantedClicks
from .shuffle import Order as Order
from .sources import ArrayRecords as ArrayRecords
from .sources import Dataset as Dataset
from .sources import Source as Source
from .sources import Synthetic as Synthetic
from .sources import Text as Text
from .sources import open_source as open_source
from .sources import throughput_unit as throughput_unit
