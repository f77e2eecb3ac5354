"""What the configs factors, two_towers and dlrm reach, beside popularity.

    python benchmarks/recommenders.py [--configs factors ...] [--seeds 3]

Each config is trained as shipped, without a run folder, with the seeds 0, 1, ...; the
planted data is the same. Of the test split it shows the distance to the planted matrix
(factors, relative), the recall at 10 (two_towers) or the area under the ROC curve
(dlrm); then the same of popularity, and of the best possible model.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from meshloom.models.dlrm import Config as Dlrm
from meshloom.sharding import Sharder
from meshloom.sharding.text import align
from meshloom.trainer.config import files as config_files
from meshloom.trainer.data import Order
from meshloom.trainer.data.batches import Batches, device_batches
from meshloom.trainer.data.planted_clicks import auc
from meshloom.trainer.run import evaluating
from meshloom.trainer.run.prepare import prepare
from meshloom.trainer.run.train import Config

CONFIGS = ("factors", "two_towers", "dlrm")


class Score(NamedTuple):
    metric: str
    model: float
    popularity: float
    best: float


def load(name: str) -> Config:
    return config_files.load([name], root=Config).config


def score(config: Config) -> Score:
    """Trains a config on one device, and returns what it reaches on the test split."""
    config = dataclasses.replace(config, eval_batches=0, test_batches=None)
    prepared = prepare(config, jax.devices()[:1])
    program, test = prepared.program, prepared.held_out["test"]
    state = program.init(jax.random.key(config.seed))
    batches: dict[str, Any] = {
        "batch_size": config.batch_size,
        "shardings": program.batch_shardings,
    }
    with device_batches(
        prepared.train_data, prepared.order, start=0, stop=config.num_steps, **batches
    ) as found:
        for batch in found:
            state, _ = program.step(state, batch)
    facts = test.data.describe()
    if isinstance(config.model, Dlrm):
        size = len(test.data)
        rows = Batches(test.data, Order(size, shuffle=False), size)[0]
        predicted = config.model.predict(state.params, rows, Sharder())
        area = auc(np.asarray(predicted["probability"]), rows["label"])
        return Score("AUC", area, facts["popularity_auc"], facts["best_auc"])
    rows = evaluating.batch_sums(
        program.evaluate, state, test.data, num_batches=test.num_batches, **batches
    )
    means = evaluating.means(evaluating.totals(rows), test.data)
    if "rmse" in means:  # of entries without noise, whose variance is 1
        return Score("distance", means["rmse"], math.nan, 0.0)
    popularity, best = (
        facts[f"{name}_recall_at_10"] for name in ("popularity", "best")
    )
    return Score("recall at 10", means["recall_at_10"], popularity, best)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--configs", nargs="+", default=CONFIGS, choices=CONFIGS)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    table = [["config", "seed", *Score._fields]]
    for name in args.configs:
        for seed in range(args.seeds):
            found = score(dataclasses.replace(load(name), seed=seed))
            numbers = [f"{x:.4f}" for x in found[1:]]
            table.append([name, str(seed), found.metric, *numbers])
            print(*table[-1], flush=True)
    print(align(table))


if __name__ == "__main__":
    main()
