"""A model that is not the same program on every host, as no model should be."""

import dataclasses
import os

from meshloom.models import transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(transformer.Config):
    def loss(self, params, batch, shard):
        total, weight, figures = super().loss(params, batch, shard)
        return total * float(os.environ.get("UNEVEN", "1")), weight, figures
