import pytest
from toy_configs import BASE, error, write

from meshloom.trainer.config.files import load


def error_in(toy, line, sets=()):
    """Returns the error for `line`, which is line 9 of mine.gin."""
    return error(toy, [write(BASE + line)], sets)


def test_a_reference_in_a_macro_is_called_in_the_scope_of_the_macro(toy):
    # As in gin.
    mine = write(
        BASE + "m = @toy.Model()\ntoy.Config.model = %m\nm/toy.Model.d_model=8"
    )
    assert load([mine], root=toy.Config).config.model.d_model == 8


def test_a_function_may_make_a_part(toy):
    line = "toy.Config.model = @toy.small()\ntoy.small.layers = 3\n"
    loaded = load(
        [write(BASE.replace("toy.Model.num_layers = 6\n", "") + line)], root=toy.Config
    )
    assert loaded.config.model == toy.Model(num_layers=3)
    assert loaded.origins["model.num_layers"] == "mine.gin:8"


def test_int_becomes_float_and_list_becomes_tuple(toy):
    mine = write(BASE + "toy.Config.clip = 1\ntoy.Config.hooks = [@toy.Hook()]\n")
    config = load([mine], root=toy.Config).config
    assert type(config.clip) is float
    assert config.hooks == (toy.Hook(),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "toy.Model.num_layers = 'six'",
            "mine.gin:9: toy.Model.num_layers must be int, got str 'six'",
        ),
        (
            "toy.Model.num_layers = True",
            "mine.gin:9: toy.Model.num_layers must be int, got bool True",
        ),
        (
            "toy.Config.name = 3",
            "mine.gin:9: toy.Config.name must be str, got int 3; put it in quotes",
        ),
        (
            "toy.Config.clip = 'no'",
            "mine.gin:9: toy.Config.clip must be float or None, got str 'no'",
        ),
        (
            "toy.Model.act = 'relu'",
            "mine.gin:9: toy.Model.act must be 'gelu' or 'swiglu', got str 'relu'",
        ),
        (
            "toy.Config.sizes = {'a': 'b'}",
            "mine.gin:9: toy.Config.sizes must be Mapping[str, int], got dict"
            " {'a': 'b'}",
        ),
        (
            "toy.AdamW.rate = @toy.Norm()",
            "mine.gin:9: toy.AdamW.rate must be toy.Rate, got toy.Norm, which has no"
            " 'at'; define it",
        ),
        (
            "toy.Config.model = @toy.Model",
            "mine.gin:9: toy.Config.model must be toy.Model, got the class toy.Model;"
            " write @toy.Model(), with parentheses, for an object of it",
        ),
        (
            "toy.Config.data = @toy.Text()",
            "mine.gin:9: toy.Text.path has no value, expected str; add the line"
            " `toy.Text.path = ...` to a config file, or pass --set data.path=...",
        ),
        (
            "toy.Config.batch_size = %gin.REQUIRED",
            "mine.gin:9: toy.Config.batch_size has no value, expected int; add the line"
            " `toy.Config.batch_size = ...` to a config file, or pass --set"
            " batch_size=...",
        ),
        (
            "toy.Config.name = %gin.REQUIRED",
            "mine.gin:9: toy.Config.name has no value, expected str; add the line"
            " `toy.Config.name = ...` to a config file, or pass --set name=...",
        ),
        (
            "toy.Config.batch_size = %size",
            "mine.gin:9: macro %size is not defined; expected one of: (none)",
        ),
        (
            "size = 4",
            "mine.gin:9: macro 'size' is never used; refer to it as %size, or remove"
            " it",
        ),
        (
            "a = %a\ntoy.Config.batch_size = %a",
            "mine.gin:9: macro 'a' refers to itself",
        ),
        (
            "a = [%a]\ntoy.Config.hooks = %a",
            "mine.gin:9: macro 'a' refers to itself",
        ),
        (
            "toy.Config.hooks = [%gin.REQUIRED]",
            "mine.gin:9: toy.Config.hooks has no value, expected tuple[toy.Hook, ...];"
            " add the line `toy.Config.hooks = ...` to a config file, or pass --set"
            " hooks=...",
        ),
        (
            "toy.Lion.b1 = 0.5",
            "mine.gin:9: toy.Lion.b1 is never used: no @toy.Lion() is in the config;"
            " refer to it, or remove the binding",
        ),
        (
            "held/toy.Model.d_model = 8",
            "mine.gin:9: held/toy.Model.d_model is never used: each toy.Model has its"
            " own value or another scope; set model.d_model, or remove the binding",
        ),
        (
            "toy.Mesh.data = 2",
            "mine.gin:9: toy.Mesh.data is never used: the object at mesh is a default,"
            " not @toy.Mesh(); set mesh.data instead",
        ),
        (
            "toy.Model.num_heads = 3",
            "mine.gin:4: toy.Model: num_heads 3 does not divide d_model 64; give"
            " another num_heads (num_heads from mine.gin:9)",
        ),
    ],
)
def test_message_of_a_binding(toy, line, message):
    assert error_in(toy, line) == message


def test_required_field_of_the_root(toy):
    assert error(toy, [], []) == (
        "toy.Config.model has no value, expected toy.Model; add the line"
        " `toy.Config.model = ...` to a config file, or pass --set model=..."
    )


def test_an_object_that_contains_itself(toy):
    assert error_in(toy, "toy.AdamW.rate = @toy.AdamW()") == (
        "mine.gin:9: toy.AdamW contains itself; remove the cycle"
    )


def test_a_set_that_another_set_replaces_is_an_error(toy):
    sets = ["optimizer.b1=0.5", "optimizer=@toy.Lion()"]
    assert error(toy, ["base.gin"], sets) == (
        "--set optimizer.b1=0.5: toy.AdamW.b1 is never used, because"
        " --set optimizer=@toy.Lion() replaces toy.Config.optimizer; remove one of"
        " them"
    )


def test_a_binding_after_the_replacement_is_an_error(toy):
    message = error_in(toy, "toy.Config.optimizer = None\ntoy.AdamW.b1 = 0.1\n")
    assert message.startswith("mine.gin:10: toy.AdamW.b1 is never used")


def test_a_wrong_type_that_a_function_made(toy):
    text = BASE.replace("toy.Model.num_layers = 6\n", "\n")
    assert error(toy, [write(text + "toy.Config.model = @toy.wrong()")]) == (
        "mine.gin:9: toy.Model.num_layers must be int, got str 'x'"
    )


def test_bindings_of_a_replaced_object_are_dropped(toy):
    lines = "r = 0.1\ntoy.AdamW.rate = @toy.Constant()\ntoy.Constant.value = %r\n"
    sets = ["optimizer=@toy.Lion()"]
    loaded = load([write(BASE + lines)], sets, root=toy.Config)
    reason = " has no effect; --set optimizer=@toy.Lion() replaces toy.Config.optimizer"
    assert loaded.dropped == (
        f"mine.gin:8: toy.AdamW.b1{reason}",
        f"mine.gin:9: macro 'r'{reason}",
        f"mine.gin:10: toy.AdamW.rate{reason}",
        f"mine.gin:11: toy.Constant.value{reason}",
    )
