"""A config for tests of plans, with sizes by letter."""

import dataclasses

from meshloom.models import transformer
from meshloom.sharding import MeshSpec
from meshloom.sharding.plans import STANDARD
from meshloom.trainer.data import Synthetic
from meshloom.trainer.program.optimizers import AdamW
from meshloom.trainer.program.pipelining import Pipelining
from meshloom.trainer.program.schedules import WarmupCosine
from meshloom.trainer.run.train import Config

B, L, D, F, V = 64, 128, 256, 512, 1024  # batch, length, width, hidden, vocabulary


def config(remat="save-named", num_microbatches=None, **model) -> Config:
    """4 layers of 4 heads, in bfloat16, with nothing but microbatches left open."""
    return Config(
        model=transformer.Config(
            **{
                "vocab_size": V,
                "num_layers": 4,
                "d_model": D,
                "num_heads": 4,
                "d_ff": F,
                "max_length": L,
                "remat": remat,
                **model,
            }
        ),
        data=Synthetic(vocab_size=V, length=L, num_examples=4096),
        optimizer=AdamW(),
        schedule=WarmupCosine(peak=1e-3),
        batch_size=B,
        num_steps=10,
        mesh=MeshSpec(fsdp=-1),
        plan=STANDARD,
        pipeline=Pipelining(schedule="1f1b", gather="step"),
        num_microbatches=num_microbatches,
    )


# Large enough not to be kept in a chip's fast memory, small enough for half a minute.
COMPILED = {
    "vocab_size": 32_000,
    "num_layers": 8,
    "d_model": 1024,
    "num_heads": 8,
    "d_ff": 2816,
    "max_length": 2048,
}


def compiled_config(*args, **settings) -> Config:
    """As `config`, of a model that a real compiler is asked to compile."""
    found = config(*args, **settings, **COMPILED)
    data = dataclasses.replace(found.data, length=COMPILED["max_length"])
    return dataclasses.replace(found, data=data)
