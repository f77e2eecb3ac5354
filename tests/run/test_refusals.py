"""A user's own class that refuses its arguments is one line, and is not restarted."""

import pytest
from paths import TINY
from tiny_runs import refused

# What the tiny config has, the user's own class, and the line.
CASES = [
    (
        "transformer.Config",
        "Model",
        "Model.check_batch: tokens of 3 letters only. Choose other data.",
    ),
    ("data.Synthetic", "Words", "Words.open: no split 'train'. Write one."),
    ("optimizers.AdamW", "Adam", "Adam.make: b1 is too large. Lower it."),
    (
        "schedules.WarmupCosine",
        "Cosine",
        "Cosine.make: 12 steps are too few. Train longer.",
    ),
]


@pytest.mark.parametrize(("given", "own", "message"), CASES)
def test_an_own_class_that_refuses(given, own, message, tmp_path, capfd):
    with open(TINY) as file:
        text = file.read().replace(given, f"refusing.{own}")
    config = tmp_path / "own.gin"
    config.write_text(
        text.replace("from meshloom import", "import refusing\nfrom meshloom import", 1)
    )
    argv = ["train", "--config", str(config), "--workdir", str(tmp_path / "run")]
    assert refused(capfd, [*argv, "--dry-run"]) == message
