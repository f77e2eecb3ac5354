import pytest
from toy_configs import BASE, error, write

from meshloom.trainer.config.files import load


def test_set_by_class_by_path_and_by_root_field(toy):
    sets = ["toy.Model.num_layers=3", "model.d_model=32", "batch_size=4"]
    config = load(["base.gin"], sets, root=toy.Config).config
    assert (config.model.num_layers, config.model.d_model) == (3, 32)
    assert config.batch_size == 4


def test_set_by_path_changes_that_place_alone(toy):
    mine = write(
        BASE + "toy.Model.norm = @toy.Norm()\ntoy.Model.head_norm = @toy.Norm()\n"
    )
    model = load([mine], ["model.norm.eps=0.5"], root=toy.Config).config.model
    assert (model.norm.eps, model.head_norm.eps) == (0.5, 1e-5)
    model = load([mine], ["toy.Norm.eps=0.5"], root=toy.Config).config.model
    assert (model.norm.eps, model.head_norm.eps) == (0.5, 0.5)


def test_set_by_path_inside_a_default_keeps_the_rest_of_it(toy):
    sets = ["mesh.data=2", "model.norm.eps=0.1", "optimizer.rate.value=3"]
    loaded = load(["base.gin"], sets, root=toy.Config)
    assert loaded.config.mesh == toy.Mesh(data=2, fsdp=3)
    assert loaded.config.model.norm.eps == 0.1
    assert loaded.config.optimizer.rate == toy.Constant(value=3.0)
    assert loaded.origins["mesh.data"] == "--set mesh.data=2"
    assert loaded.origins["mesh.fsdp"] == "default"


def test_set_by_path_through_containers_and_macros(toy):
    mine = write(BASE + "m = [@toy.Hook(), @toy.Hook()]\ntoy.Config.hooks = %m\n")
    config = load([mine], ["hooks.1.every=7"], root=toy.Config).config
    assert config.hooks == (toy.Hook(), toy.Hook(every=7))
    write(
        BASE + "m = [@toy.Hook(), @toy.Hook()]\ntoy.Config.hooks = %m\n"
        "m/toy.Hook.every = 5\n"
    )
    config = load([mine], ["hooks.1.every=7"], root=toy.Config).config
    assert config.hooks == (toy.Hook(every=5), toy.Hook(every=7))


def test_set_replaces_a_part_and_then_a_field_of_the_new_one(toy):
    sets = ["optimizer=@toy.Lion()", "optimizer.b1=0.7"]
    loaded = load(["base.gin"], sets, root=toy.Config)
    assert loaded.config.optimizer == toy.Lion(b1=0.7)
    assert loaded.dropped == (
        "base.gin:8: toy.AdamW.b1 has no effect; --set optimizer=@toy.Lion() replaces"
        " toy.Config.optimizer",
    )
    assert loaded.text.startswith("# dropped: base.gin:8: toy.AdamW.b1 has no effect")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model.num_layer=4",
            "toy.Model has no parameter 'num_layer'; did you mean 'num_layers'?",
        ),
        ("toy.Modle.num_layers=4", "toy has no class 'Modle'; did you mean 'Model'?"),
        (
            "modle.num_layers=4",
            "'modle' is not a field of toy.Config, an imported module or a macro; did"
            " you mean 'model'?",
        ),
        (
            "batchsize=4",
            "'batchsize' is not a field of toy.Config, an imported module or a macro;"
            " did you mean 'batch_size'?",
        ),
        ("model.num_layers", "expected NAME=VALUE, such as num_steps=100"),
        (
            "name=fast",
            "'fast' is not a value; expected a Python literal, @module.Class() or"
            " %macro; a string needs quotes: --set 'name=\"fast\"'",
        ),
        (
            "name=",
            "'' is not a value; expected a Python literal, @module.Class() or %macro;"
            " a string needs quotes: --set 'name=\"\"'",
        ),
        (
            "clip=none",
            "'none' is not a value; expected a Python literal, @module.Class() or"
            " %macro; write clip=None",
        ),
        ("model.num_layers='six'", "toy.Model.num_layers must be int, got str 'six'"),
        (
            "batch_size.x=1",
            "batch_size is 8, in which 'x' is not a field of an object; set batch_size"
            " itself",
        ),
        (
            "toy.Lion.b1=0.5",
            "toy.Lion.b1 is never used: no @toy.Lion() is in the config; refer to it,"
            " or remove the binding",
        ),
        (
            "model=@toy.Modle()",
            "toy has no class 'Modle'; did you mean 'Model'?",
        ),
    ],
)
def test_message_of_a_set(toy, text, message):
    assert error(toy, ["base.gin"], [text]) == f"--set {text}: {message}"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "toy.Config.hooks = %gin.REQUIRED\n",
            "--set hooks.0.every=1: hooks is %gin.REQUIRED, in which '0.every' is"
            " not a field of an object; set hooks itself",
        ),
        (
            "toy.Config.hooks = [@slow/toy.Hook]\n",
            "--set hooks.0.every=1: hooks.0 is @slow/toy.Hook, in which 'every' is"
            " not a field of an object; set hooks.0 itself",
        ),
        (
            "a = %b\nb = %a\ntoy.Config.hooks = %a\n",
            "mine.gin:9: macro 'a' refers to itself",
        ),
    ],
)
def test_message_of_a_path_that_leads_to_no_object(toy, lines, message):
    assert error(toy, [write(BASE + lines)], ["hooks.0.every=1"]) == message


def test_values_that_are_valid_only_together(toy):
    sets = ["model.d_model=9", "model.num_heads=3"]
    model = load(["base.gin"], sets, root=toy.Config).config.model
    assert (model.d_model, model.num_heads) == (9, 3)
