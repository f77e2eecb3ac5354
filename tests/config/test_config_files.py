import importlib
import json
import re
import sys

import pytest
from toy_configs import BASE, error, write

from meshloom.trainer.config import files as config_files
from meshloom.trainer.config import tree as config_tree
from meshloom.trainer.config.files import ConfigError, load, override


@pytest.fixture
def toy(toy, tmp_path, monkeypatch):
    """With "base" as a shipped config, not a file in the working folder."""
    (tmp_path / "shipped").mkdir()
    (tmp_path / "base.gin").rename(tmp_path / "shipped" / "base.gin")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        config_files,
        "shipped",
        lambda: {p.stem: p for p in (tmp_path / "shipped").iterdir()},
    )
    return toy


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
    # Defaults are written too, so that a changed default does not change an old run.
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


def test_a_reloaded_module_is_used(toy):
    load(["base"], root=toy.Config)
    sys.modules.pop("toy")
    fresh = importlib.import_module("toy")
    assert fresh.Config is not toy.Config
    assert type(load(["base"], root=fresh.Config).config.model) is fresh.Model


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
            "import toyz",
            "mine.gin:9: no module named 'toyz'; install it, or add its folder to"
            " PYTHONPATH",
        ),
        (
            "toy.Model.num_layers 4",
            "mine.gin:9: syntax error at `toy.Model.num_layers 4`: Couldn't parse"
            " statement, expected ':' or '='; expected `module.Class.parameter ="
            " value`, with quotes around strings",
        ),
        (
            "toy.Config.name = run",
            "mine.gin:9: syntax error at `toy.Config.name = run`: Failed to parse token"
            " 'run'; expected `module.Class.parameter = value`, with quotes around"
            " strings",
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
    ],
)
def test_message_of_a_file(toy, line, message):
    assert error(toy, [write(BASE + line)]) == message


def test_missing_config(toy):
    assert error(toy, ["bas"]) == (
        "config 'bas' is neither a file nor a shipped config; did you mean 'base'?"
    )


def test_a_class_that_changes_its_arguments(toy):
    text = BASE.replace("toy.AdamW.b1 = 0.8\n", "\n")
    message = error(toy, [write(text + "toy.Config.optimizer = @toy.Grows()")])
    assert message == (
        "gin reads toy.Config back with different values: optimizer.size  2 -> 3; make"
        " the __post_init__ of that class idempotent"
    )


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
        ("batch_size.x", 1, "--flag: int 8 has no field 'x'; name a field"),
        (
            "name",
            "x",
            "--flag and --set name='y' both set name; remove one of them",
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
