"""`meshloom plan schedule`, through the command line."""

import json
import re
from xml.etree import ElementTree

import pytest
from tiny_runs import command, refused

from meshloom.trainer.cli import main

BASE = ("plan", "schedule", "--stages", "4", "--microbatches", "16")
SIZES = ("--activation", "64MiB", "--layers", "8", "--weights", "4GiB", "--fsdp", "8")


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def run(*flags) -> str:
        assert main([*BASE, *flags]) == 0
        return capsys.readouterr().out

    return run


def row(shown: str, title: str) -> list[str]:
    """The cells of the one line with that title."""
    lines = [line for line in shown.splitlines() if line.strip(" *").startswith(title)]
    (line,) = lines
    return re.split(r"  +", line.strip(" *"))[1:]


def test_picture_facts_and_comparison(run):
    shown = run("--schedule", "1f1b")
    assert "stage 0  F  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15  ." in shown
    assert "\x1b" not in shown  # no terminal, no colours
    assert row(shown, "bubble") == ["15.8 %"]
    assert row(shown, "saved inputs") == ["at most 7 on a stage; by stage: 7, 5, 3, 1"]
    assert row(shown, "gpipe") == ["38", "76", "15.8 %", "1.188", "16"]
    assert row(shown, "interleaved, 2 chunks") == ["42", "70", "8.6 %", "1.094", "11"]
    assert row(shown, "none") == ["3 forwards", "57", "7"]
    assert row(shown, "full") == ["5 forwards", "95", "7"]
    chosen = [line[2:].split()[0] for line in shown.splitlines() if line[:1] == "*"]
    assert chosen == ["1f1b", "save-named"]
    assert "weights gathered" not in shown


def test_sizes_give_bytes(run):
    shown = run("--schedule", "interleaved", *SIZES)
    assert row(shown, "ring")[0].endswith("the one before: 4.4 GiB")
    assert row(shown, "outside")[0].endswith("embedding and head: 3.0 GiB")
    assert row(shown, "gpipe")[-2:] == ["1.0 GiB + 8 layers", "2.4 GiB"]
    assert row(shown, "none")[-3:] == ["0", "44", "704.0 MiB + 44 layers"]
    assert row(shown, "save-named")[-3:] == ["0", "4", "704.0 MiB + 4 layers"]
    assert row(shown, "full")[-3:] == ["4", "1", "960.0 MiB + 1 layer"]
    assert row(shown, "once a step") == ["1", "1", "7.0 GiB", "4.5 GiB", "4.0 GiB"]
    assert row(shown, "once a microbatch") == (
        ["52.5", "17.5", "245.0 GiB", "1.0 GiB", "1.0 GiB"]
    )


def test_residuals_complete_the_memory(run):
    residuals = ("--residual", "none=1GiB", "--residual", "save-dots=0.5GiB")
    shown = run(*SIZES, *residuals, "--remat", "save-dots")
    assert row(shown, "none")[-1] == "56.4 GiB"  # 7 of 64 MiB, 7 x 8 layers
    assert row(shown, "save-dots")[-1] == "4.4 GiB"
    assert row(shown, "full")[-1] == "1.9 GiB"


def test_chunks_are_those_of_interleaved_wherever_it_stands(run):
    assert row(run("--chunks", "3"), "interleaved, 3 chunks")[0] == "62"


def test_interleaved_that_cannot_be_is_left_out_and_named(run):
    shown = run("--layers", "3")
    assert "interleaved is left out: 3 layers a stage cannot be split into 2" in shown
    assert "interleaved, 2" not in shown
    assert "interleaved, 3 chunks" in run("--layers", "3", "--chunks", "3")
    notes = json.loads(run("--layers", "3", "--json"))["notes"]
    assert [note[:23] for note in notes] == ["interleaved is left out"]


def test_one_stage(run):
    shown = run("--stages", "1")
    assert row(shown, "bubble") == ["0.0 %"]
    assert "ring" not in shown and "embedding" not in shown


def test_a_narrow_terminal_gets_fewer_ticks(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    shown = run()
    assert "of 22 are left out." in shown
    assert max(len(line) for line in shown.splitlines()[:9]) <= 50


def test_colours_on_a_terminal(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in run()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run()


def test_json(run):
    document = json.loads(run("--json", *SIZES))
    assert document["schedule"]["name"] == "1f1b"
    assert document["schedule"]["bubble"] == pytest.approx(3 / 19)
    assert [r["name"] for r in document["schedules"]] == [
        "gpipe",
        "1f1b",
        "interleaved",
    ]
    assert [r["remat"] for r in document["remat"]] == ["none", "save-named", "full"]
    assert [r["gather"] for r in document["gather"]] == ["step", "microbatch"]
    assert document["schedule"]["memory"]["inputs"] == 7 * 64 * 2**20


def test_svg(run, tmp_path):
    path = tmp_path / "schedule.svg"
    assert run("--svg", str(path)).endswith(f"The picture is in {path}.\n")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--microbatches 0", "the number of microbatches must be >= 1, got 0"),
        ("--schedule zero", "schedule must be one of gpipe, 1f1b, interleaved, got"),
        ("--remat some", "remat must be one of none, save-named, save-dots"),
        ("--chunks 0 --layers 3", "the number of chunks must be >= 1, got 0"),
        (
            "--schedule interleaved --layers 3",
            "schedule interleaved: 3 layers per stage",
        ),
        ("--activation 64MB", "--activation: '64MB' is not a size; expected a number"),
        ("--activation 0", "--activation: '0' is not a size"),
        ("--activation=", "--activation: '' is not a size"),
        ("--layers 0", "--layers must be at least 1, got 0"),
        ("--fsdp 8", "--fsdp needs --weights"),
        ("--weights 8", "--weights needs --fsdp and --layers"),
        ("--weights 8 --fsdp 0 --layers 1", "--fsdp must be at least 1, got 0"),
        ("--residual none=3", "--residual needs --layers and --activ"),
        (
            "--layers 2 --activation 9 --residual none",
            "--residual 'none': expected POL",
        ),
        (
            "--layers 2 --activation 9 --residual full=3",
            "residual_bytes: policies must be none",
        ),
        ("--svg missing/folder.svg", "missing/folder.svg: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(capfd, flags, message):
    assert message in refused(capfd, [*BASE, *flags.split()])


def test_stages_must_be_given():
    result = command("plan", "schedule", "--microbatches", "4")
    assert result.returncode == 2
    assert "the following arguments are required: --stages" in result.stderr


def test_a_real_process_touches_no_device():
    result = command(*BASE, env={"JAX_PLATFORMS": "no_such_platform"})
    assert result.returncode == 0, result.stderr
    assert "bubble        15.8 %" in result.stdout
