"""Bad input: one line that says what to do, exit status 2, and nothing written."""

import pathlib
import re
import sys

import pytest
from tiny_runs import TINY, digest, refused, sets_of, train

from meshloom.trainer.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder as `meshloom train` leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(train(folder)) == 0
    return folder


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Folders of text: `none` is missing, the others are what their names say."""
    root = tmp_path_factory.mktemp("corpora")
    (root / "empty").mkdir()
    for name, num_files, text in [("short", 8, "abc"), ("few", 30, "hello world " * 4)]:
        (root / name).mkdir()
        for number in range(num_files):
            (root / name / f"{number}.txt").write_text(text)
    return root


def text(path, *sets) -> list[str]:
    """Returns flags that replace the synthetic data by a folder of text."""
    sets = ("data=@data.Text()", f'data.path="{path}"', "data.length=16", *sets)
    return [
        flag for value in ("model.vocab_size=257", *sets) for flag in sets_of(value)
    ]


FLAGS = {
    "misspelled field": (
        sets_of("model.num_layer=4"),
        "--set model.num_layer=4: transformer.Config has no parameter 'num_layer'; "
        "did you mean 'num_layers'?",
    ),
    "misspelled top-level field": (
        sets_of("batchsize=4"),
        "--set batchsize=4: 'batchsize' is not a field of train.Config.* did you mean "
        "'batch_size'?",
    ),
    "misspelled class": (
        sets_of("transformer.Confg.num_layers=4"),
        "transformer has no class 'Confg'; did you mean 'Config'?",
    ),
    "wrong type": (
        sets_of("model.num_layers='four'"),
        "transformer.Config.num_layers must be int, got str 'four'",
    ),
    "fraction for a count": (
        sets_of("batch_size=1.5"),
        "train.Config.batch_size must be int, got float 1.5",
    ),
    "string without quotes": (
        sets_of("plan=data"),
        "'data' is not a value; .*a string needs quotes: --set 'plan=\"data\"'",
    ),
    "unused binding": (
        sets_of("optimizers.Lion.b1=0.5"),
        "optimizers.Lion.b1 is never used: no @optimizers.Lion() is in the config; "
        "refer to it, or remove the binding",
    ),
    "one value given twice": (
        sets_of("num_steps=4"),
        "--steps and --set num_steps=4 both set num_steps; remove one of them",
    ),
    "mesh too small": (
        ["--mesh", "data=3"],
        "mesh data=3 needs 3 devices, but there are 8. Change the axis sizes, or set "
        "one axis to -1.",
    ),
    "mesh too large": (
        ["--mesh", "data=4,fsdp=4"],
        "mesh data=4,fsdp=4 needs 16 devices, but there are 8.",
    ),
    "axis that does not divide a dimension": (
        ["--mesh", "tensor=8", *sets_of("model.num_heads=8", "model.vocab_size=65")],
        "embedding: dimension 'vocab' of size 65 cannot be sharded 8 ways (tensor=8). "
        "Set model.pad_vocab_to to 8, use a mesh whose tensor divides 65, or set "
        "rules={'vocab': ['tensor', None]} to replicate it if it is not divisible.",
    ),
    "batch that the mesh does not divide": (
        sets_of("batch_size=12"),
        "batch_size 12 cannot be sharded 8 ways (data=8). Set batch_size to 8 or 16, "
        "or change the mesh.",
    ),
    "hidden units that the mesh does not divide": (
        ["--mesh", "tensor=8", *sets_of("model.num_heads=8", "model.d_ff=60")],
        "blocks/mlp/down: dimension 'mlp' of size 60 cannot be sharded 8 ways "
        "(tensor=8). Set model.d_ff to 56 or 64, use a mesh whose tensor divides 60,",
    ),
    "a rule for a mesh axis that does not exist": (
        sets_of("rules={'mlp': 'tensr'}"),
        "names mesh axis 'tensr', but the mesh has replica, pipe,",
    ),
    "a rule of a role that does not exist": (
        sets_of("rules={'mlp': {'optimiser': 'fsdp'}}"),
        "role 'optimiser'",
    ),
    "microbatches that do not divide the batch": (
        sets_of("num_microbatches=3"),
        "batch_size 16 is not divisible by num_microbatches 3; 18 would be (batch_size "
        "from .*tiny.gin:16, num_microbatches from --set num_microbatches=3)",
    ),
    "microbatch that the mesh does not divide": (
        sets_of("num_microbatches=4"),
        "batch_size 16 in 4 microbatches cannot be sharded 8 ways (data=8). Set "
        "batch_size to 32, change num_microbatches, or change the mesh.",
    ),
    "share of a learner that the mesh does not divide": (
        ["--exchange", "127.0.0.1:1", "--learner", "1/4"],
        "batch_size 16 of 4 learners cannot be sharded 8 ways (data=8). Set batch_size "
        "to 32, or change the mesh.",
    ),
    "vocabulary larger than the model's": (
        sets_of("data.vocab_size=65"),
        "the data has a vocabulary of 65, but the model's vocab_size is 64. Raise "
        "vocab_size to 65.",
    ),
    "sequence longer than the model takes": (
        sets_of("data.length=64"),
        "sequences have length 64, but the model's max_length is 32. Raise max_length "
        "or shorten the data's length.",
    ),
    "mesh axis unknown": (
        ["--mesh", "dta=8"],
        "mesh 'dta=8': 'dta' is not a mesh axis. Axes: replica, pipe, data, fsdp,",
    ),
    "mesh without a size": (
        ["--mesh", "data"],
        "mesh 'data': the size of 'data' must be an integer, got ''. Write data=4, "
        "or data=-1 for the remaining devices.",
    ),
    "mesh size no number": (
        ["--mesh", "data=all"],
        "mesh 'data=all': the size of 'data' must be an integer, got 'all'.",
    ),
    "mesh size zero": (
        ["--mesh", "data=0"],
        "mesh axis 'data' must be a positive integer, or -1 for the remaining "
        "devices, got 0",
    ),
    "mesh with two open axes": (
        ["--mesh", "data=-1,fsdp=-1"],
        "only one axis may be -1, got ['data', 'fsdp']. Set the sizes of the others.",
    ),
    "plan unknown": (
        sets_of('plan="data+fdsp"'),
        "plan 'data+fdsp': 'fdsp' is not a plan. Plans: data, fsdp, zero1, tensor,",
    ),
    "writer unknown": (
        sets_of('writers=("tensorbord",)'),
        "writers: 'tensorbord' is not a writer; expected 'tensorboard' or 'wandb'",
    ),
    "no checkpoint kept": (
        sets_of("keep_checkpoints=0"),
        "keep_checkpoints must be >= 1, got 0 (keep_checkpoints from --set",
    ),
    "interval below zero": (
        sets_of("save_every=-5"),
        "save_every must be >= 0, got -5",
    ),
    "sample from data without text": (
        sets_of('sample_prompt="abc"'),
        "sample_prompt and sample_tokens: transformer.Config with data Synthetic "
        "cannot generate text: .* Train on text, or leave sample_prompt unset.",
    ),
    "no devices": (["--cpu-devices", "0"], "--cpu-devices must be >= 1, got 0"),
}


def pattern(message: str) -> str:
    """Returns the message as a regular expression, in which only `.*` is special."""
    return ".*".join(re.escape(part) for part in message.split(".*"))


@pytest.mark.parametrize("what", FLAGS)
def test_bad_flags(run, capfd, what):
    flags, message = FLAGS[what]
    before = digest(run)
    assert re.search(pattern(message), refused(capfd, train(run, *flags)))
    assert digest(run) == before


DATA = {
    "missing": (
        "none",
        [],
        "no file or folder '.*none' (relative to .*). Correct the path, or create the "
        "folder.",
    ),
    "empty": (
        "empty",
        [],
        "no file matches '**/*' in the folder '.*empty'. Name a folder that contains "
        "files, or change the pattern.",
    ),
    "sequence longer than the data": (
        "short",
        ["data.holdout=0.5", "data.length=32"],
        "split 'train': the split has .* tokens, but one example of length 32 needs "
        "33. Lower length to at most .*, or add data to the split.",
    ),
    "nothing held out": (
        "few",
        ["data.holdout=0.0"],
        "split 'eval' is empty: holdout=0.0 of 30 documents selects none. Set "
        "eval_path to the files of this split, raise holdout, or add documents.",
    ),
    "sample longer than the model takes": (
        "few",
        ["data.holdout=0.5", 'sample_prompt="hello"'],
        "sample_prompt and sample_tokens: prompt tokens (5) plus new tokens (256) "
        "are 261, but the model's max_length is 32. Generate at most 27 tokens.",
    ),
}


@pytest.mark.parametrize("what", DATA)
def test_bad_data(run, corpora, capfd, what):
    name, sets, message = DATA[what]
    before = digest(run)
    line = refused(capfd, train(run, *text(corpora / name), *sets_of(*sets)))
    assert re.search(pattern(message), line), line
    assert digest(run) == before


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "llama3_80b",
            "config 'llama3_80b' is neither a file nor a shipped config; did you mean "
            "'llama3_8b'?",
        ),
        (
            "folder/mine.gin",
            "config 'folder/mine.gin' is neither a file nor a shipped config; expected "
            "one of: deepseek_moe_16b, default, digits, digits_resnet,",
        ),
    ],
)
def test_missing_config(run, capfd, name, message):
    before = digest(run)
    line = refused(capfd, ["train", "--config", name, "--workdir", str(run)])
    assert message in line
    assert digest(run) == before


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "transformer.Config.num_layer = 4",
            "tiny.gin:14: transformer.Config has no parameter 'num_layer'; did you "
            "mean 'num_layers'?",
        ),
        ("optimizers.Lion.b1 = 0.5", "tiny.gin:14: optimizers.Lion.b1 is never used"),
        ("num_layers = ", "tiny.gin:14: syntax error at "),
    ],
)
def test_a_bad_line_of_a_file_is_named(run, tmp_path, capfd, line, message):
    lines = pathlib.Path(TINY).read_text().splitlines()
    place = next(i for i, each in enumerate(lines) if each.startswith("train.Config"))
    lines.insert(place, line)
    file = tmp_path / "tiny.gin"
    file.write_text("\n".join(lines) + "\n")
    before = digest(run)
    found = refused(capfd, ["train", "--config", str(file), "--workdir", str(run)])
    assert message.replace("14", str(place + 1)) in found
    assert digest(run) == before


@pytest.mark.parametrize("missing", ["COORDINATOR", "NUM_PROCESSES", "PROCESS_ID"])
def test_half_a_description_of_a_job(run, capfd, monkeypatch, missing):
    given = {"COORDINATOR": "127.0.0.1:1", "NUM_PROCESSES": "2", "PROCESS_ID": "0"}
    for name, value in given.items():
        if name != missing:
            monkeypatch.setenv(f"MESHLOOM_{name}", value)
    before = digest(run)
    line = refused(capfd, train(run))
    assert f"MESHLOOM_{missing} is not set. Set all of MESHLOOM_COORDINATOR," in line
    assert digest(run) == before


def test_a_writer_that_is_not_installed(run, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    before = digest(run)
    line = refused(capfd, train(run, *sets_of('writers=("tensorboard",)')))
    assert line == (
        "the tensorboard writer needs the package tensorboardX, which is not "
        "installed; install it with: pip install 'meshloom[tensorboard]'"
    )
    assert digest(run) == before


def test_our_own_defects_keep_their_traceback(monkeypatch, tmp_path):
    """A ValueError from inside a library is not reported as the user's mistake."""
    from meshloom.trainer.commands import config

    monkeypatch.setattr(config, "_show", lambda args: int("x"))
    monkeypatch.setitem(vars(config), "__name__", "elsewhere")
    with pytest.raises(ValueError, match="invalid literal"):
        main(["config", "show"])


def test_a_traceback_on_request(run, monkeypatch):
    monkeypatch.setenv("MESHLOOM_TRACEBACK", "1")
    with pytest.raises(ValueError, match="is not a mesh axis"):
        main(train(run, "--mesh", "dta=8"))
