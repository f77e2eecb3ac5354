"""What a trained classifier takes for what, on a split that it was not trained on.

For models whose predictions have an array `class` and data with an array `label`.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding import Sharder
from ..data import Order
from ..data.batches import SAMPLE_IDS, device_batches
from ..program import contract
from ..program.state import State
from .held_out import HeldOut
from .prepare import Prepared

LABEL, CLASS, PROBABILITY = "label", "class", "probability"
FILE = "mistakes.json"
# How many examples are kept, and the most classes of a table of all against all.
NUM_WORST, MOST_CLASSES = 24, 100


def compare(prepared: Prepared, state: State) -> dict[str, Any] | None:
    """Returns counts of labels and predictions, and the worst mistakes.

    None for models and data that are not of this kind, and in a pipeline, whose parts
    make no predictions. Every process must call this.
    """
    program, splits = prepared.program, prepared.held_out
    split = splits.get("test") or splits.get("eval")
    is_classifier = hasattr(program.model, "predict") and LABEL in program.batch
    if split is None or not is_classifier or program.staging is not None:
        return None
    found = _predictions(prepared, state, split)
    if CLASS not in found:
        return None
    labels, classes = found[LABEL], found[CLASS]
    num_classes = int(max(labels.max(), classes.max())) + 1
    result: dict[str, Any] = {
        "split": split.name,
        "step": int(state.step),
        "examples": len(labels),
        "mistakes": int(np.sum(labels != classes)),
    }
    if num_classes <= MOST_CLASSES:
        counts = np.zeros((num_classes, num_classes), int)
        np.add.at(counts, (labels, classes), 1)
        result["confusion"] = counts.tolist()
    return result | {"worst": _worst(split, found)}


def _predictions(
    prepared: Prepared, state: State, split: HeldOut
) -> dict[str, np.ndarray]:
    """Returns labels and predictions of all examples of an evaluation, in order."""
    program, config = prepared.program, prepared.config
    shard = Sharder(prepared.mesh, program.rules)

    def predict(params, variables, batch):
        batch = {name: x for name, x in batch.items() if name != SAMPLE_IDS}
        found = contract.predict(program.model, params, batch, shard, variables)
        return {**found, LABEL: batch[LABEL]}

    everywhere = NamedSharding(prepared.mesh, P())
    predict = jax.jit(predict, out_shardings=everywhere)
    results = []
    with device_batches(
        split.data,
        Order(len(split.data), shuffle=False),
        batch_size=config.batch_size,
        shardings=program.batch_shardings,
        start=0,
        stop=split.num_batches,
        training=False,
        num_examples=len(split.data),
    ) as batches:
        for batch in batches:
            found = predict(state.params, state.variables, batch)
            results.append(jax.device_get(found))
    return {
        name: np.concatenate([result[name] for result in results])[: split.num_examples]
        for name in results[0]
    }


def _worst(split: HeldOut, found: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Returns the mistakes of which the model is most certain, worst first."""
    wrong = np.flatnonzero(found[LABEL] != found[CLASS])
    certain = found.get(PROBABILITY, np.ones(len(found[LABEL])))
    order = np.argsort(-certain[wrong], kind="stable")
    worst = []
    for i in wrong[order][:NUM_WORST].tolist():
        row: dict[str, Any] = {"example": i}
        for name in (LABEL, CLASS):
            row[name] = int(found[name][i])
        if PROBABILITY in found:
            row[PROBABILITY] = round(float(found[PROBABILITY][i]), 4)
        image = split.data[i].get("image")
        if image is not None and image.ndim == 3 and image.shape[2] in (1, 3):
            row["image"] = _bytes(image).tolist()
        worst.append(row)
    return worst


def _bytes(image: np.ndarray) -> np.ndarray:
    """Returns the pixels from 0, the darkest of the image, to 255."""
    image = image.astype(np.float64) - image.min()
    return np.round(255 * image / max(image.max(), 1e-12)).astype(np.uint8)
