"""Config files for the classes of `toy`."""

import pytest

from meshloom.trainer.config.files import ConfigError, load

BASE = """\
from __gin__ import dynamic_registration
import toy

toy.Config.model = @toy.Model()
toy.Config.batch_size = 8
toy.Config.optimizer = @toy.AdamW()
toy.Model.num_layers = 6
toy.AdamW.b1 = 0.8
"""


def write(text, name="mine.gin"):
    with open(name, "w") as f:
        f.write(text)
    return name


def error(toy, files, sets=()):
    with pytest.raises(ConfigError) as caught:
        load(files, sets, root=toy.Config)
    assert "\n" not in str(caught.value)
    return str(caught.value)
