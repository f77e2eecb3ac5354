import importlib
import json
import re
import sys

import pytest

from meshloom.trainer import config_files, config_tree
from meshloom.trainer.config_files import ConfigError, load, override

TOY = """
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol


class Rate(Protocol):
    def at(self, step: int) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    value: float = 0.5

    def at(self, step):
        return self.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    eps: float = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    num_layers: int = 2
    d_model: int = 64
    num_heads: int = 4
    act: Literal["gelu", "swiglu"] = "gelu"
    norm: Norm = Norm()
    head_norm: Norm | None = None

    def __post_init__(self):
        if self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} does not divide d_model {self.d_model};"
                "\\n give another num_heads"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    b1: float = 0.9
    rate: Rate = Constant()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion:
    b1: float = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    path: str
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    data: int = 1
    fsdp: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
    every: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    model: Model
    batch_size: int
    optimizer: Any = None
    data: Text | None = None
    eval_data: Text | None = None
    mesh: Mesh = Mesh(fsdp=3)
    hooks: tuple[Hook, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    name: str = "run"
    clip: float | None = None


def small(layers: int = 1) -> Model:
    return Model(num_layers=layers)


def wrong() -> Model:
    return Model(num_layers="x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grows:
    size: int = 1

    def __post_init__(self):
        object.__setattr__(self, "size", self.size + 1)
"""

BASE = """\
from __gin__ import dynamic_registration
import toy

toy.Config.model = @toy.Model()
toy.Config.batch_size = 8
toy.Config.optimizer = @toy.AdamW()
toy.Model.num_layers = 6
toy.AdamW.b1 = 0.8
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A user's module, the shipped configs "base" and "other", and the folder."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "base.gin").write_text(BASE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    monkeypatch.setattr(
        config_files,
        "shipped",
        lambda: {p.stem: p for p in (tmp_path / "shipped").iterdir()},
    )
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module("toy")
    sys.modules.pop("toy", None)


def write(text, name="mine.gin"):
    with open(name, "w") as f:
        f.write(text)
    return name


def error(toy, files, sets=()):
    with pytest.raises(ConfigError) as caught:
        load(files, sets, root=toy.Config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def error_in(toy, line, sets=()):
    """The message for `line`, which is line 9 of mine.gin after the base lines."""
    return error(toy, [write(BASE + line)], sets)


# What a load gives.


def test_values_and_origins(toy):
    loaded = load(["base"], ["model.d_model=32"], root=toy.Config)
    assert loaded.config == toy.Config(
        model=toy.Model(num_layers=6, d_model=32),
        batch_size=8,
        optimizer=toy.AdamW(b1=0.8),
    )
    origins = loaded.origins
    assert origins["model"] == "base.gin:4"
    assert origins["model.num_layers"] == "base.gin:7"
    assert origins["model.d_model"] == "--set model.d_model=32"
    assert origins["model.act"] == "default"
    assert origins["mesh.fsdp"] == "default"
    assert set(config_tree.flatten(loaded.config)) <= set(origins)


def test_later_files_win(toy):
    mine = write("import toy\ntoy.Config.batch_size = 16\n")
    loaded = load(["base", mine], root=toy.Config)
    assert loaded.config.batch_size == 16
    assert loaded.origins["batch_size"] == "mine.gin:2"


def test_include_of_a_shipped_name_and_of_a_neighbour(toy, tmp_path):
    (tmp_path / "sub").mkdir()
    write('include "base.gin"\ntoy.Config.batch_size = 9\n', "sub/near.gin")
    write('include "near.gin"\ntoy.Config.name = "far"\n', "sub/far.gin")
    loaded = load(["sub/far.gin"], root=toy.Config)
    assert (loaded.config.batch_size, loaded.config.name) == (9, "far")
    assert loaded.origins["batch_size"] == "sub/near.gin:2"
    assert loaded.origins["model"] == "base.gin:4"


def test_scopes_macros_blocks_and_containers(toy):
    mine = write(
        BASE
        + """
path = "a.txt"
toy.Config:
  data = @toy.Text()
  eval_data = @held/toy.Text()
  hooks = [@toy.Hook(), @slow/toy.Hook()]
  sizes = {"a": 1}
toy.Text.path = %path
held/toy.Text.path = "b.txt"
slow/toy.Hook.every = 10
"""
    )
    loaded = load([mine], root=toy.Config)
    assert loaded.config.data.path == "a.txt"
    assert loaded.config.eval_data.path == "b.txt"
    assert [hook.every for hook in loaded.config.hooks] == [1, 10]
    assert loaded.origins["data.path"] == "mine.gin:10"
    assert loaded.origins["hooks.1.every"] == "mine.gin:18"
    changed = load([mine], ['path="c.txt"'], root=toy.Config)
    assert changed.config.data.path == "c.txt"
    assert changed.origins["data.path"] == '--set path="c.txt"'


def test_a_reference_in_a_macro_is_called_in_the_scope_of_the_macro(toy):
    # The rule is gin's own.
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
    "extra",
    [
        "",
        'toy.Config.name = "it\'s # \\n two"\ntoy.Config.clip = 1e999\n',
        "toy.Config.hooks = (@toy.Hook(), @slow/toy.Hook())\nslow/toy.Hook.every = 9\n",
        'toy.Config.data = @toy.Text()\ntoy.Text.path = "x"\ntoy.Text.shape = (-1,)\n',
        "toy.Model.norm = @toy.Norm()\ntoy.Model.head_norm = @h/toy.Norm()\n"
        "h/toy.Norm.eps = 2\n",
        "toy.Config.sizes = {'a': 1, 'b': -2}\n",
    ],
)
def test_text_gives_the_same_config_again(toy, extra):
    loaded = load([write(BASE + extra)], ["mesh.data=2"], root=toy.Config)
    again = load([write(loaded.text, "config.gin")], root=toy.Config)
    assert again.config == loaded.config
    assert config_tree.digest(again.config) == config_tree.digest(loaded.config)
    # Defaults are written too: a changed default does not change an old run.
    assert "default" not in again.origins.values()


def test_text_names_the_origin_of_each_line(toy):
    text = load(["base"], ["mesh.data=2"], root=toy.Config).text
    assert "toy.Model.num_layers = 6  # base.gin:7\n" in text
    assert "toy.Mesh.data = 2  # --set mesh.data=2\n" in text


def test_nothing_leaks_into_the_next_load(toy):
    before = load(["base"], root=toy.Config)
    load(["base"], ["model.num_layers=9", "toy.Config.name='x'"], root=toy.Config)
    error(toy, ["base"], ["model.num_layers='six'"])
    assert load(["base"], root=toy.Config) == before


def test_gin_is_left_empty_whatever_it_held(toy):
    gin = config_files.gin
    gin.parse_config("import toy")
    gin.finalize()
    load(["base"], root=toy.Config)
    assert gin.config_str() == gin.operative_config_str() == ""
    assert not gin.config_is_locked()


def test_a_name_imported_by_an_included_file_does_not_hide_ones_own(toy):
    write("class Model: pass\n", "other.py")
    write("import other as toy\n", "near.gin")
    mine = write(BASE + 'include "near.gin"\ntoy.Model.d_model = 8\n')
    assert load([mine], root=toy.Config).config.model.d_model == 8


def test_a_module_loaded_anew_is_used(toy):
    load(["base"], root=toy.Config)
    sys.modules.pop("toy")
    fresh = importlib.import_module("toy")
    assert fresh.Config is not toy.Config
    assert type(load(["base"], root=fresh.Config).config.model) is fresh.Model


# The forms of --set.


def test_set_by_class_by_path_and_by_root_field(toy):
    sets = ["toy.Model.num_layers=3", "model.d_model=32", "batch_size=4"]
    config = load(["base"], sets, root=toy.Config).config
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
    loaded = load(["base"], sets, root=toy.Config)
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
    loaded = load(["base"], sets, root=toy.Config)
    assert loaded.config.optimizer == toy.Lion(b1=0.7)
    assert loaded.dropped == (
        "base.gin:8: toy.AdamW.b1 went with toy.Config.optimizer"
        " (--set optimizer=@toy.Lion())",
    )
    assert loaded.text.startswith("# dropped: base.gin:8: toy.AdamW.b1 went with")


# Messages.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "toy.Modle.num_layers = 4",
            "mine.gin:9: toy has no class 'Modle'; did you mean 'Model'?",
        ),
        (
            "toy.Model.num_layer = 4",
            "mine.gin:9: toy.Model has no parameter 'num_layer';"
            " did you mean 'num_layers'?",
        ),
        (
            "tyo.Model.num_layers = 4",
            "mine.gin:9: 'tyo' is not an imported module; did you mean 'toy'?",
        ),
        (
            "Model.num_layers = 4",
            "mine.gin:9: 'Model' is not an imported module; did you mean 'toy.Model'?",
        ),
        (
            "toy.num_layers = 4",
            "mine.gin:9: toy is a module, expected a class; write toy.CLASS",
        ),
        (
            "import toyz",
            "mine.gin:9: there is no module 'toyz'; install it, or add its folder to"
            " PYTHONPATH",
        ),
        (
            "from meshloom.trainer import config_file",
            "mine.gin:9: there is no module 'meshloom.trainer.config_file';"
            " did you mean 'config_files'?",
        ),
        (
            "from toy import Model",
            "mine.gin:9: there is no module 'toy.Model'; import the module toy and"
            " write its name before Model",
        ),
        (
            "toy.Model.num_layers 4",
            "mine.gin:9: syntax error at `toy.Model.num_layers 4`: Couldn't parse"
            " statement, expected ':' or '='; expected `module.Class.parameter ="
            " value`, where a string has quotes",
        ),
        (
            "toy.Config.name = run",
            "mine.gin:9: syntax error at `toy.Config.name = run`: Failed to parse token"
            " 'run'; expected `module.Class.parameter = value`, where a string has"
            " quotes",
        ),
        (
            'include "basse.gin"',
            "mine.gin:9: config 'basse.gin' is neither a file nor a shipped config;"
            " did you mean 'base'?",
        ),
        (
            'include "mine.gin"',
            "mine.gin:9: mine.gin includes itself; remove the include",
        ),
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
            " `toy.Text.path = ...` to a config file, or give --set data.path=...",
        ),
        (
            "toy.Config.batch_size = %gin.REQUIRED",
            "mine.gin:9: toy.Config.batch_size has no value, expected int; add the line"
            " `toy.Config.batch_size = ...` to a config file, or give --set"
            " batch_size=...",
        ),
        (
            "toy.Config.name = %gin.REQUIRED",
            "mine.gin:9: toy.Config.name has no value, expected str; add the line"
            " `toy.Config.name = ...` to a config file, or give --set name=...",
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
            "mine.gin:9: macro 'a' is defined by itself",
        ),
        (
            "toy.Lion.b1 = 0.5",
            "mine.gin:9: toy.Lion.b1 is never used: no @toy.Lion() is in the config;"
            " refer to it, or remove the binding",
        ),
        (
            "held/toy.Model.d_model = 8",
            "mine.gin:9: held/toy.Model.d_model is never used: each toy.Model has a"
            " value of its own or another scope; set model.d_model, or remove it",
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
def test_message_of_a_file(toy, line, message):
    assert error_in(toy, line) == message


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
            "'modle' is no field of toy.Config, imported module or macro; did you mean"
            " 'model'?",
        ),
        (
            "batchsize=4",
            "'batchsize' is no field of toy.Config, imported module or macro; did you"
            " mean 'batch_size'?",
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
            "batch_size holds 8, in which 'x' is not the field of an object; set"
            " batch_size as a whole",
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
    assert error(toy, ["base"], [text]) == f"--set {text}: {message}"


def test_missing_config(toy):
    assert error(toy, ["bas"]) == (
        "config 'bas' is neither a file nor a shipped config; did you mean 'base'?"
    )


def test_required_field_of_the_root(toy):
    assert error(toy, [], []) == (
        "toy.Config.model has no value, expected toy.Model; add the line"
        " `toy.Config.model = ...` to a config file, or give --set model=..."
    )


def test_failing_import_names_the_line(toy):
    write("1 / 0\n", "broken.py")
    assert error_in(toy, "import broken") == (
        "mine.gin:9: import of broken failed: ZeroDivisionError: division by zero"
    )


def test_a_part_of_itself(toy):
    assert error_in(toy, "toy.AdamW.rate = @toy.AdamW()") == (
        "mine.gin:9: toy.AdamW is a part of itself; cut the loop"
    )


def test_a_set_that_another_set_replaces_is_an_error(toy):
    sets = ["optimizer.b1=0.5", "optimizer=@toy.Lion()"]
    assert error(toy, ["base"], sets) == (
        "--set optimizer.b1=0.5: toy.AdamW.b1 is never used, because"
        " toy.Config.optimizer was replaced by --set optimizer=@toy.Lion(); give one of"
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


def test_a_class_that_changes_its_arguments(toy):
    text = BASE.replace("toy.AdamW.b1 = 0.8\n", "\n")
    message = error(toy, [write(text + "toy.Config.optimizer = @toy.Grows()")])
    assert message == (
        "gin reads toy.Config back with other values: optimizer.size  2 -> 3; make the"
        " __post_init__ of that class give the same for what it has made"
    )


# Flags of their own.


def test_override(toy):
    loaded = load(["base"], root=toy.Config)
    new = override(loaded, "mesh", toy.Mesh(data=4), "--mesh")
    new = override(new, "batch_size", 2, "--batch")
    assert (new.config.mesh, new.config.batch_size) == (toy.Mesh(data=4), 2)
    assert new.origins["mesh.data"] == "--mesh"
    assert new.origins["batch_size"] == "--batch"
    assert new.origins["model.num_layers"] == "base.gin:7"
    again = load([write(new.text)], root=toy.Config)
    assert again.config == new.config
    assert loaded.config.batch_size == 8


def test_override_of_an_inexpressible_value_says_so_in_the_text(toy):
    loaded = load(["base"], root=toy.Config)
    new = override(loaded, "optimizer", {1, 2}, "--opt")
    assert new.config.optimizer == {1, 2}
    assert "# optimizer = {1, 2}: gin cannot express this value  # --opt\n" in new.text


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("batch_size", "4", "--flag: toy.Config.batch_size must be int, got str '4'"),
        (
            "batchsize",
            4,
            "--flag: toy.Config has no parameter 'batchsize'; did you mean"
            " 'batch_size'?",
        ),
        (
            "model.num_heads",
            3,
            "--flag: toy.Model: num_heads 3 does not divide d_model"
            " 64; give another num_heads",
        ),
        (
            "name",
            "x",
            "--flag and --set name='y' both give name; leave one of them out",
        ),
    ],
)
def test_override_messages(toy, path, value, message):
    loaded = load(["base"], ["name='y'"], root=toy.Config)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        override(loaded, path, value, "--flag")


def test_flat_values_of_a_config_and_of_a_run_folder(toy, tmp_path):
    loaded = load(["base"], root=toy.Config)
    run = tmp_path / "run"
    run.mkdir()
    recorded = config_tree.to_json(loaded.config, loaded.origins)
    (run / "config.json").write_text(json.dumps(recorded))
    flat = config_files.flat_values("base", root=toy.Config)
    assert flat == config_files.flat_values(str(run), root=toy.Config)
    with pytest.raises(ConfigError, match="is a run folder, whose config is fixed"):
        config_files.flat_values(str(run), ["batch_size=2"], root=toy.Config)


def test_every_name_in_the_package_data_is_a_shipped_config():
    assert all(file.is_file() for file in config_files.shipped().values())
