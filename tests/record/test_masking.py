"""Tests that secrets are kept out of logs and files, also in a real run."""

import json

import pytest
from tiny_runs import TINY, command, refused, train

from meshloom.launch.masking import (
    is_secret,
    looks_secret,
    masked,
    masked_command,
    masked_text,
    secret_argument,
)
from meshloom.trainer.cli import main
from meshloom.trainer.config import files as config_files
from meshloom.trainer.config import tree as config_tree
from meshloom.trainer.record import run_folder
from meshloom.trainer.record.invocation import Invocation
from meshloom.trainer.run.train import Config

SENTINEL = "s3ntinel-4711"


@pytest.mark.parametrize(
    "name",
    "FAKE_API_KEY WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID HF_TOKEN "
    "GITHUB_TOKEN DB_PASSWORD PGPASSWORD GOOGLE_APPLICATION_CREDENTIALS apiKey "
    "service.api_key --api-key X-Goog-Signature".split(),
)
def test_names_of_secrets(name):
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    "XLA_FLAGS PATH MESHLOOM_COORDINATOR JAX_PLATFORMS tokens_per_s tokenizer "
    "num_tokens keep_every data.TextFiles keyboard author".split(),
)
def test_names_that_hide_nothing(name):
    assert not looks_secret(name)


@pytest.mark.parametrize(
    "name, value",
    [
        ("api_key", "x"),
        ("password", "x"),
        ("wandb_api_key", "x"),
        ("client_secret", "x"),
        ("token", "0123456789abcdef0123456789abcdef01234567"),
        ("model_id", "hf_abcdefghijklmnopqrstuvwxyz"),
        ("folder", "gs://me:pw@bucket"),
    ],
)
def test_what_is_certainly_a_secret(name, value):
    assert is_secret(name, value)
    assert secret_argument(["--set", f"data.{name}='{value}'"]) is not None


@pytest.mark.parametrize(
    "name, value",
    [
        ("text_key", "article_body_2024"),
        ("eos_token", "<|reserved_special_token_2|>"),
        ("pad_token", "<pad>"),
        ("key", "tokens"),
        ("token", "[MASK]"),
        ("key", "a_rather_long_name_of_a_column_1_of_3"),
        ("api_key", ""),
    ],
)
def test_settings_that_are_only_called_like_secrets(name, value):
    assert not is_secret(name, value)
    assert secret_argument(["--set", f"data.{name}={value}"]) is None


def test_a_key_is_masked_whatever_its_name():
    found = masked_text("model hf_abcdefghijklmnopqrstuvwxyz of the hub")
    assert found == "model *** of the hub"


def test_a_config_may_name_tokens_and_keys(tmp_path, capfd, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "keyed_rows.py").write_text(
        "import dataclasses\n"
        "from meshloom.trainer.data import Synthetic\n\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class Rows(Synthetic):\n"
        "  vocab_size: int = 64\n"
        "  length: int = 16\n"
        "  text_key: str = 'text'\n"
        "  eos_token: str = '<eos>'\n"
    )
    config = tmp_path / "rows.gin"
    config.write_text(
        f"include '{TINY}'\nimport keyed_rows\n"
        "train.Config.data = @keyed_rows.Rows()\nkeyed_rows.Rows.text_key = 'body'\n"
    )
    argv = ["--config", str(config), "--set", "data.eos_token='</s>'"]
    assert main(["config", "show", *argv]) == 0
    shown = capfd.readouterr().out
    assert "'body'" in shown and "'</s>'" in shown
    assert "--set data.eos_token=***" in shown  # the origin is masked as in a log


def test_no_setting_of_ours_is_taken_for_a_secret():
    config = config_files.load([TINY], root=Config).config
    assert [name for name in config_tree.flatten(config) if looks_secret(name)] == []


def test_the_name_of_a_file_is_not_a_secret():
    assert not looks_secret("exchange.token_file")
    assert looks_secret("exchange.token") and looks_secret("file_token")


def test_variables():
    found = masked({"HF_TOKEN": "abc", "A": "https://me:pw@host/x", "B_KEY": ""})
    assert found == {"HF_TOKEN": "***", "A": "https://***@host/x", "B_KEY": ""}


def test_text():
    text = "get https://me:pw@host/a?token=abc&x=1 with api_key=abc and steps=3"
    assert masked_text(text) == (
        "get https://***@host/a?token=***&x=1 with api_key=*** and steps=3"
    )


@pytest.mark.parametrize(
    "given, shown",
    [
        ("--set service.api_key=abc --steps 3", "--set service.api_key=*** --steps 3"),
        ("--set=service.api_key=abc --steps 3", "--set=service.api_key=*** --steps 3"),
        ("--api-key abc --steps 3", "--api-key *** --steps 3"),
        ("--api-key --steps 3", "--api-key --steps 3"),
        ("--folder gs://u:pw@b/c --steps=3", "--folder gs://***@b/c --steps=3"),
        (
            "--config default --mesh data=2,fsdp=2",
            "--config default --mesh data=2,fsdp=2",
        ),
    ],
)
def test_command_lines(given, shown):
    assert masked_command(given.split()) == shown.split()


def test_a_value_with_blanks_is_masked_to_its_end():
    assert masked_command(["--env", "MY_KEY=a b 'c'"]) == ["--env", "MY_KEY=***"]


# A real run.


def test_nothing_secret_is_in_a_run_folder(tmp_path):
    run = tmp_path / "run"
    found = command(
        *train(run, "--steps", "2", "--cpu-devices", "1", "--set", "eval_batches=0"),
        env={
            "FAKE_API_KEY": SENTINEL,
            "WANDB_API_KEY": SENTINEL,
            "HF_TOKEN": SENTINEL,
            "MESHLOOM_RESTART_REASON": f"told by https://me:{SENTINEL}@host",
        },
    )
    assert found.returncode == 0, found.stderr
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"environment.json", "config.json", "ledger.jsonl", "report.html"} <= {
        path.name for path in files
    }
    assert SENTINEL not in found.stdout + found.stderr
    assert [path for path in files if SENTINEL.encode() in path.read_bytes()] == []


def test_the_recorded_command_has_no_secret():
    argv = ["train", "--set", f"x.api_key={SENTINEL}"]
    environ = {"XLA_FLAGS": f"--xla_dump_to=gs://me:{SENTINEL}@bucket"}
    found = run_folder.environment({"data": 1}, 1, Invocation.of(argv, environ))
    assert SENTINEL not in json.dumps(found)
    assert found["command"] == "meshloom train --set 'x.api_key=***'"
    assert found["xla_flags"] == "--xla_dump_to=gs://***@bucket"


@pytest.mark.parametrize(
    "value",
    [
        f"service.api_key={SENTINEL}",
        f"model.api_key='{SENTINEL}'",
        f"checkpoint_folder='gs://me:{SENTINEL}@b/c'",
        f"checkpoint_folder='https://me:{SENTINEL}@b/c'",
    ],
)
def test_a_secret_flag_is_refused_and_not_repeated(value, capfd, tmp_path):
    message = refused(capfd, train(tmp_path / "run", "--dry-run", "--set", value))
    assert SENTINEL not in message and value.partition("=")[0] in message
    assert "environment variable" in message


def test_a_secret_in_a_config_file_is_refused(capfd, tmp_path):
    config = tmp_path / "secret.gin"
    config.write_text(
        "from __gin__ import dynamic_registration\n"
        "from meshloom.trainer.run import train\n"
        f"train.Config.checkpoint_folder = 'gs://me:{SENTINEL}@b/c'\n"
    )
    argv = train(tmp_path / "run", "--dry-run", "--config", str(config))
    message = refused(capfd, argv)
    assert SENTINEL not in message and "config value checkpoint_folder" in message


def test_an_unknown_flag_is_named_without_its_value(capfd):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--api-key", SENTINEL])
    message = capfd.readouterr().err
    assert (
        "unrecognized arguments: --api-key ***" in message and SENTINEL not in message
    )
