"""The models, batches and optimizers that a case names."""

import dataclasses
from typing import Any

import numpy as np
from fuzz_cases import TRANSFORMER, Case
from noisy import C, F, Noisy
from toy_stack import Classifier

from meshloom.models import transformer
from meshloom.trainer.data.batches import SAMPLE_IDS
from meshloom.trainer.data.packing import PackedDataset
from meshloom.trainer.program import optimizers, schedules

NUM_STEPS = 4
PEAK = 1e-2
OPTIMIZERS = {
    "AdamW": optimizers.AdamW(),
    "Lion": optimizers.Lion(),
    # Small matrices are factored too.
    "Adafactor": optimizers.Adafactor(min_dim_size_to_factor=4, weight_decay=0.1),
    "Muon": optimizers.Muon(),
}
RATES = {
    "Constant": schedules.Constant(value=PEAK),
    "WarmupCosine": schedules.WarmupCosine(peak=PEAK, warmup_share=0.5),
    "WarmupStableDecay": schedules.WarmupStableDecay(
        peak=PEAK, warmup_share=0.25, decay_share=0.5
    ),
}


class Images(Classifier):
    """A Classifier that the trainer takes: any batch will do."""

    def check_batch(self, batch, facts):
        del batch, facts


def make_model(case: Case) -> Any:
    if case.family == "transformer":
        fields: dict[str, Any] = TRANSFORMER | dict(case.model)
        return transformer.Config(max_length=case.length, **fields)
    return {"classifier": Images, "noisy": Noisy}[case.family](**case.model)


def make_plain(model: Any) -> Any:
    """The model of the same numbers without what only saves memory or time."""
    plain = {"remat": "none", "unroll": 1}
    names = {field.name for field in dataclasses.fields(model)}
    return dataclasses.replace(model, **{k: v for k, v in plain.items() if k in names})


def batches(case: Case, model: Any, start: int, stop: int) -> list[dict]:
    """The batches of these steps, the same whatever the layout."""
    return [_batch(case, model, number) for number in range(start, stop)]


def _batch(case: Case, model: Any, number: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    rows = case.batch_size
    first = number * rows
    ids = {SAMPLE_IDS: np.arange(first, first + rows, dtype=np.uint32)}
    if case.family == "noisy":
        x = random.normal(size=(rows, F)).astype(np.float32)
        return ids | {"x": x, "label": random.integers(0, C, rows).astype(np.int32)}
    if case.family == "classifier":
        image = random.normal(size=(rows, model.side, model.side)).astype(np.float32)
        label = random.integers(0, model.num_classes, rows).astype(np.int32)
        weights = _weights(case, random, (rows,), number)
        return ids | {"image": image, "label": label, "importance": weights}
    if case.data == "packed":
        return ids | _packed(case, model, random)
    tokens = random.integers(0, model.vocab_size, (rows, case.length + 1))
    tokens = tokens.astype(np.int32)
    weights = _weights(case, random, (rows, case.length), number)
    return ids | {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights,
    }


def _weights(
    case: Case, random: Any, shape: tuple[int, ...], number: int
) -> np.ndarray:
    weights = np.ones(shape, np.float32)
    if case.data == "some":
        weights = random.random(shape).astype(np.float32)
        weights[random.random(shape) < 0.3] = 0
    elif case.data == "rows":  # most rows count nothing, so some microbatches neither
        weights[1:] = 0
    elif case.data == "nan" and number == 1:
        weights[-1] = np.nan
    return weights


def _packed(case: Case, model: Any, random: Any) -> dict[str, np.ndarray]:
    """Documents of a token and more, each example with several or a part of one."""
    num_tokens = case.batch_size * case.length + 1
    lengths = random.integers(1, 2 * case.length, num_tokens)
    tokens = random.integers(1, model.vocab_size, 2 * case.length).astype(np.int32)
    dataset = PackedDataset(
        lengths,
        lambda document, start, stop: np.roll(tokens, document)[start:stop],
        end=0,
        length=case.length,
        num_bytes=num_tokens,
        separate_documents=True,
        what="fuzz",
        about={},
    )
    rows = [dataset[i] for i in range(case.batch_size)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
