"""Tests that a model which breaks the contract is rejected with one line."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import npz_rows
import optax
import pytest
from jax import P
from noisy import CONFIG, Noisy
from npz_rows import Linear
from short_runs import prepare
from tiny_runs import TINY
from toy_stack import Classifier

from meshloom.sharding import MeshSpec, parse_plan
from meshloom.trainer.config import files as config_files
from meshloom.trainer.program import contract, pipelining
from meshloom.trainer.run.train import Config


def refused(model, **changes) -> str:
    with pytest.raises(ValueError) as caught:
        prepare(CONFIG, "fsdp=3,tensor=2", model=model, **changes)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400, message
    return message


class LacksALeaf(Noisy):
    def axes(self):
        return {k: v for k, v in super().axes().items() if k != "bias"}


class OneLeafTooMany(Noisy):
    def axes(self):
        return super().axes() | {"skip": ("embed",)}


class TooFewNames(Noisy):
    def axes(self):
        return super().axes() | {"up": ("embed",)}


class ANameForATuple(Noisy):
    def axes(self):
        return super().axes() | {"bias": "classes"}


class LacksAVariable(Noisy):
    def variable_axes(self):
        return {"input": super().variable_axes()["input"]}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LacksALeaf(), "LacksALeaf.axes() lacks 'bias', an array of shape (6,). Add"),
        (OneLeafTooMany(), "OneLeafTooMany.axes() names 'skip', but there is no such"),
        (TooFewNames(), "TooFewNames.axes() has ('embed',) for 'up', an array of "),
        (ANameForATuple(), "ANameForATuple.axes() has 'classes' for 'bias', an array"),
        (LacksAVariable(), "LacksAVariable.variable_axes() lacks 'hidden/mean', an"),
    ],
)
def test_axes_that_do_not_fit(model, message):
    assert refused(model).startswith(message)


class Scalar(Noisy):
    def loss(self, params, batch, shard, **kwargs):
        return jnp.mean(batch["x"]) * jnp.sum(params["bias"])


class Mean(Linear):
    def loss(self, params, batch, shard):
        return super().loss(params, batch, shard)[0]


class Pair(Linear):
    def loss(self, params, batch, shard):
        return super().loss(params, batch, shard)[:2]


class PerExample(Linear):
    def loss(self, params, batch, shard):
        total, weight, _ = super().loss(params, batch, shard)
        return total, weight, {"accuracy": batch["x"][:, 0]}


class Taken(Linear):
    def loss(self, params, batch, shard):
        total, weight, _ = super().loss(params, batch, shard)
        return total, weight, {"loss": total}


class NoStatistics(Noisy):
    def loss(self, params, batch, shard, *, variables, key, train):
        extras = {"variables": variables, "key": key, "train": train}
        return super().loss(params, batch, shard, **extras)[:3]


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Mean(), "Mean.loss returned a scalar; expected (sum, weight, {"),
        (Pair(), "Pair.loss returned (a scalar, a scalar); expected (sum, weight"),
        (
            PerExample(),
            "PerExample.loss returned (a scalar, a scalar, {accuracy: an array of ",
        ),
        (Taken(), "Taken.loss returned another sum named 'loss'"),
    ],
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_what_a_loss_returns(model, found, num_microbatches, tmp_path):
    config = npz_rows.config(npz_rows.write(tmp_path / "rows.npz"), model=model)
    with pytest.raises(ValueError) as caught:
        prepare(config, "data=2,fsdp=2", num_microbatches=num_microbatches)
    assert str(caught.value).startswith(found) and "\n" not in str(caught.value)


def test_a_model_with_variables_returns_their_sums():
    assert refused(NoStatistics()).startswith(
        "NoStatistics.loss returned (a scalar, a scalar, {accuracy: a scalar}); expec"
    )


class OldKey(Noisy):
    def loss(self, params, batch, shard, rng):
        raise AssertionError


class Everything(Noisy):
    def loss(self, params, batch, **kwargs):
        raise AssertionError


class NoUpdate(Linear):
    def loss(self, params, batch, shard, *, variables):
        raise AssertionError


class NoAxes(Linear):
    def init_variables(self, key):
        return {}

    def variable_axes(self):
        return {}


class NotTaken(NoAxes):
    def update_variables(self, variables, sums):
        return variables


class Lossless(Noisy):
    @property
    def loss(self):
        raise AttributeError


class Grows(Noisy):
    def update_variables(self, variables, sums):
        return variables | {"input": {"mean": jnp.zeros(1), "variance": jnp.ones(12)}}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            OldKey(),
            "OldKey.loss(params, batch, shard, rng): the trainer calls "
            + contract.SIGNATURE,
        ),
        (Everything(), "Everything.loss(params, batch, **kwargs): the trainer calls"),
        (Scalar(), "Scalar.loss(params, batch, shard, **kwargs): the trainer calls"),
        (NoUpdate(), "model NoUpdate has no method init_variables. A model with vari"),
        (NoAxes(), "model NoAxes has no method update_variables. A model with varia"),
        (NotTaken(), "model NotTaken has init_variables, but its loss does not take"),
        (Lossless(), "model Lossless has no method loss. A model has init, axes, bat"),
        (
            Grows(),
            "Grows.update_variables returned float32[1] for 'input/mean', but the "
            "variables have float32[12].",
        ),
    ],
)
def test_what_a_loss_takes(model, message):
    assert refused(model).startswith(message)


def test_arguments_with_defaults_are_the_models_own():
    class Smoothed(Linear):
        def loss(self, params, batch, shard, smoothing=0.1):
            raise AssertionError

    assert contract.extras(Smoothed()) == ()
    assert contract.extras(Noisy()) == ("variables", "key", "train")


def test_a_pipeline_refuses_what_its_stages_do_not_get():
    class Random(Classifier):
        def loss(self, params, batch, shard, *, key):
            raise AssertionError

    config = dataclasses.replace(CONFIG, model=Random(), plan="data+pipeline")
    mesh = MeshSpec(pipe=2, data=2).abstract()
    with pytest.raises(ValueError, match="pipe=2: Random.loss takes key, but a pipel"):
        pipelining.make_staging(
            config.model,
            mesh,
            parse_plan(config.plan),
            config.pipeline,
            batch_size=config.batch_size,
        )


def test_an_axis_without_a_rule_names_the_setting():
    assert refused(Noisy(), rules={}) == (
        "bias: no rule for logical axis 'classes'. Add one to the config: "
        "rules={'classes': 'tensor'} shards it over the mesh axis tensor, "
        "rules={'classes': None} replicates it."
    )


def test_a_batch_that_does_not_divide_names_the_sizes_that_do():
    assert refused(Noisy(), batch_size=32, num_microbatches=2) == (
        "batch_size 32 in 2 microbatches cannot be sharded 3 ways (fsdp=3). Set "
        "batch_size to 30 or 36, change num_microbatches, or change the mesh."
    )
    assert refused(Noisy(), batch_size=25) == (
        "batch_size 25 cannot be sharded 3 ways (fsdp=3). Set batch_size to 24 or 27, "
        "or change the mesh."
    )


def test_an_activation_that_does_not_divide_names_the_rules():
    """Found inside jit, where the loss shards it."""

    class Tall(Noisy):
        def loss(self, params, batch, shard, *, variables, key, train):
            shard(jnp.zeros((24, 5)), ("batch", "classes"))
            raise AssertionError

    message = refused(Tall())
    assert "dimension 'classes' of size 5 cannot be sharded 2 ways (tensor=2). " in (
        message
    )
    assert "set rules={'classes': ['tensor', None]} to replicate it" in message


def test_rules_in_a_config_file_come_back_as_they_were(tmp_path):
    """A tuple is one candidate with two mesh axes; a list is several candidates."""
    text = (
        "rules={'a': ['tensor', None], 'b': ('data', 'fsdp'), 'c': {'param': 'fsdp'}}"
    )
    first = config_files.load([TINY], [text], root=Config)
    (tmp_path / "again.gin").write_text(first.text)
    again = config_files.load([str(tmp_path / "again.gin")], root=Config).config
    assert again.rules == first.config.rules
    rows = {row.name: row for row in again.make_rules().rows if row.plan == "config"}
    assert rows["a"].candidates == (("tensor",), ())
    assert rows["b"].candidates == (("data", "fsdp"),)
    assert rows["c"].role == "param"


def test_rules_may_hold_for_one_role_or_replace_those_of_the_plan():
    rules = {"classes": {"param": "fsdp", "optimizer": "fsdp", "compute": None}}
    prepared = prepare(CONFIG, "fsdp=3", rules=rules | {"mlp": None})
    spec = {array.path: array.spec for array in prepared.layout.params.arrays}
    assert spec["bias"] == P("fsdp") and spec["down"] == P(None, "fsdp")
    assert spec["up"] == P("fsdp", None)


@dataclasses.dataclass(frozen=True)
class Sketch:
    """An optimizer whose state has an array shaped like no parameter."""

    def make(self, learning_rate, axes):
        def init(params):
            return {"sketch": jnp.zeros((48, 48))}

        def update(grads, state, params=None):
            return jax.tree.map(lambda g: -0.01 * g, grads), state

        return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class NamedSketch(Sketch):
    state_axes: ClassVar = {"sketch": ("mlp", "embed")}


def test_state_of_a_custom_optimizer():
    message = refused(Noisy(), optimizer=Sketch())
    assert message.startswith("optimizer state sketch of shape (48, 48) belongs to no")
    assert message.endswith(
        "give Sketch an attribute state_axes = {'sketch': (None, None)}, which "
        "replicates it."
    )
    prepared = prepare(CONFIG, "fsdp=3,tensor=2", optimizer=NamedSketch())
    assert prepared.layout.opt_state.arrays[0].spec == P("tensor", "fsdp")
