"""`meshloom rounds simulate`: tables, JSON, pictures, and what is refused."""

import argparse
import json
import pathlib
import xml.etree.ElementTree as ElementTree

import pytest

from meshloom.service.rounds.policy import PRESETS
from meshloom.trainer.commands import rounds


def run(*words: str) -> None:
    parser = argparse.ArgumentParser()
    rounds.add(parser.add_subparsers())
    args = parser.parse_args(["rounds", *words])
    args.run(args)


def test_all_modes_are_compared_in_one_table(capsys):
    run("simulate", "--learners", "4", "--slow", "1x4", "--rounds", "4")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["mode", *PRESETS]
    goodput = {line.split()[0]: line for line in lines}
    assert "straggler costs" in lines[0] and "goodput" in lines[0]
    assert goodput["sync"].count("%") == 3


def test_json_says_what_a_straggler_costs(capsys):
    words = ["--learners", "4", "--rounds", "5", "--params", "1e6", "--json"]
    run("simulate", "--mode", "sync", "--slow", "1x4", "--jitter", "0", *words)
    (found,) = json.loads(capsys.readouterr().out)
    # A step of 0.5 s and 2 x 0.032 s of transfers, or 2 s and the same.
    assert found["straggler_cost"] == pytest.approx(1 - 0.564 / 2.064)
    assert found["learners"][3]["bytes_up"] == 5 * 4e6
    run("simulate", "--mode", "sync", *words)
    (found,) = json.loads(capsys.readouterr().out)
    assert found["straggler_cost"] is None


def test_settings_of_the_policy_can_be_changed(capsys):
    words = ["--mode", "diloco", "--rounds", "2", "--jitter", "0", "--params", "0"]
    run("simulate", *words, "--policy", "local_steps=100", "--json")
    (found,) = json.loads(capsys.readouterr().out)
    assert found["seconds"] == pytest.approx(100.0)


def test_the_picture_shows_every_learner_and_commit(tmp_path, capsys):
    path = tmp_path / "run.svg"
    words = ["--mode", "local-sgd", "--learners", "3", "--rounds", "4"]
    run("simulate", *words, "--mtbf", "100", "--svg", str(path))
    assert f"The picture is in {path}." in capsys.readouterr().out.replace("\n", " ")
    root = ElementTree.parse(path).getroot()
    titles = [e.text or "" for e in root.iter() if e.tag.endswith("title")]
    assert {title.partition(":")[0] for title in titles} == {
        "learner 0",
        "learner 1",
        "learner 2",
    }
    lines = [e for e in root.iter() if e.tag.endswith("path")]
    assert lines[-1].attrib["d"].count("M") == 4


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "an action is missing; expected simulate, compare or replay"),
        (["simulate", "--mode", "sink"], "mode 'sink' is unknown; expected sync"),
        (["simulate", "--slow", "4"], "--slow '4': expected NUMBERxFACTOR"),
        (["simulate", "--slow", "9x2"], "--slow names 9 learners, but --learners is 8"),
        (["simulate", "--link", "fast"], "--link 'fast': expected a number above 0"),
        (["simulate", "--link", "0Gbit"], "--link '0Gbit': expected a number above 0"),
        (["simulate", "--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["simulate", "--learners", "0"], "--learners must be >= 1, got 0"),
        (["simulate", "--svg", "x.svg"], "--svg draws one run: name its mode"),
        (["simulate", "--policy", "late"], "--policy 'late': expected NAME=VALUE"),
        (
            ["simulate", "--mode", "async", "--policy", "quorum=9"],
            "quorum=9 is larger than the number of learners, 8",
        ),
    ],
)
def test_wrong_flags_are_refused_in_one_line(words, message):
    with pytest.raises(ValueError, match=message):
        run(*words)


def test_the_page_shows_what_the_simulator_prints(capsys):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "rounds.md").read_text()
    line = next(x for x in page.splitlines() if x.startswith("meshloom rounds simu"))
    run(*line.split()[2:])
    assert capsys.readouterr().out.strip() in page


@pytest.mark.parametrize("name", ["sync", "decoupled"])
def test_pictures_of_the_page_are_those_of_its_commands(name, tmp_path):
    docs = pathlib.Path(__file__).parents[2] / "docs"
    page = (docs / "rounds.md").read_text()
    line = next(x for x in page.splitlines() if x.endswith(f"--svg {name}.svg"))
    path = tmp_path / "run.svg"
    run(*line.split()[2:-1], str(path))
    assert path.read_text() == (docs / f"rounds-{name}.svg").read_text()
