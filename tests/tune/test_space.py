"""The file that says what `meshloom tune` tries."""

import numpy as np
import optuna
import pytest

from meshloom.trainer.config.bindings import ConfigError
from meshloom.trainer.run.train import Config
from meshloom.trainer.tune import space

RANGE = '{"low": 1e-4, "high": 1e-1, "log": True}'


@pytest.fixture
def read(tmp_path):
    def read(text: str) -> space.Space:
        path = tmp_path / "space.gin"
        path.write_text(text)
        return space.read(str(path))

    return read


def test_values_are_settings_in_the_range(read):
    found = read(
        f"schedule.value = {RANGE}\n"
        'model.num_layers = {"low": 2, "high": 8, "step": 2}\n'
        'optimizer.b1 = {"low": 0, "high": 0.5, "step": 0.25}\n'
        "optimizer = [@optimizers.AdamW(), @optimizers.Muon()]\n"
        'model.widths = [(8, 16), (16,), ["x", 1]]  # a comment\n'
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    rows = [found.suggest(study.ask()) for _ in range(60)]
    rates = np.array([float(row["schedule.value"]) for row in rows])
    assert (rates >= 1e-4).all() and (rates <= 1e-1).all()
    assert 1e-3 < np.median(rates) < 1e-2  # half of a linear range would be above
    assert {row["model.num_layers"] for row in rows} == {"2", "4", "6", "8"}
    assert {row["optimizer.b1"] for row in rows} == {"0.0", "0.25", "0.5"}
    texts = {"@optimizers.AdamW()", "@optimizers.Muon()"}
    assert {row["optimizer"] for row in rows} == texts
    assert {row["model.widths"] for row in rows} == {"(8, 16)", "(16,)", "['x', 1]"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "sets nothing; expected lines such as"),
        ("a.b = 3", ":1: a.b is 3, expected a list of choices or a range"),
        ("a.b = [3, 3]", "a.b has 1 choices, expected at least 2"),
        ('a.b = {"low": 1}', "the range of a.b has no 'high'"),
        ('a.b = {"low": 1, "hihg": 2}', "a range has no 'hihg'; did you mean 'high'?"),
        ('a.b = {"low": 2, "high": 2}', "low is 2, expected less than 2"),
        ('a.b = {"low": "1", "high": 2}', "low is '1', expected a number"),
        ('a.b = {"low": 0, "high": 2, "log": True}', "expected > 0 for a log scale"),
        ('a.b = {"low": 0, "high": 2, "step": 3}', "step is 3, expected at most"),
        ("a.b = [1, 2]\n\na.b = [3, 4]", ":3: a.b is also set in"),
        ("import x\na.b = [1, 2]", ":1: expected NAME = VALUE"),
        ("a.b = [1,", "syntax error"),
    ],
)
def test_a_wrong_space_is_one_line(read, text, message):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="none.gin cannot be read"):
        space.read(str(tmp_path / "none.gin"))


@pytest.mark.parametrize(
    "text, sets, message",
    [
        ("model.width = [1, 2]", (), "did you mean 'd_hidden'|no parameter 'width'"),
        ("batch_size = [60, -1]", (), r"space.gin:1: .*batch_size"),
        ("batch_size = [60, 120]", ("batch_size=30",), "--set batch_size=30 fixes"),
        ("schedule.value = [1e-3, 'x']", (), "space.gin:1: .*value"),
    ],
)
def test_a_setting_that_the_config_does_not_take_is_found_first(
    read, text, sets, message
):
    with pytest.raises(ConfigError, match=message):
        read(text).check(["digits"], sets, Config)
