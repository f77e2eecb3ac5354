"""The comparison of meshes: what each process measures, and what follows from it."""

import io
import json
import math
import re
import types

import npz_rows
import numpy as np
import pytest
from tiny_runs import TINY, command

from meshloom.trainer.cli import main
from meshloom.trainer.job.group import Group
from meshloom.trainer.program.computation import choose_plain
from meshloom.trainer.verify import scale, scale_jobs, scale_trial
from meshloom.trainer.verify.certify_meshes import Machine, ProcessMesh
from meshloom.trainer.verify.scale_plot import svg
from meshloom.trainer.verify.scale_result import Measured, Result


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    path = npz_rows.write(tmp_path_factory.mktemp("rows") / "rows.npz")
    meshes = {
        "data=1": ("data=1", 16),
        "fsdp=4": ("fsdp=4", 16),
        "weak": ("data=2", 32),
    }
    found = scale_trial.Trials(
        npz_rows.config(path), meshes, Group(), choose_plain, lambda _: (0.5, "")
    )
    for mesh in meshes:
        found.prepare(mesh)
    return found


def test_all_meshes_train_the_same_steps(trials):
    one, four = (trials.prepare(mesh) for mesh in ("data=1", "fsdp=4"))
    assert (one["sharded"], four["sharded"]) == (1, 0.25)
    assert one["foretold"] == 0.5
    for first in (0, 3):
        answers = [trials.steps(mesh, first, 3) for mesh in ("data=1", "fsdp=4")]
        np.testing.assert_allclose(*[x["losses"] for x in answers], rtol=1e-6)
        assert all(x["seconds"] > 0 for x in answers)
    one, four = (trials.state(mesh) for mesh in ("data=1", "fsdp=4"))
    np.testing.assert_allclose(one["probes"], four["probes"], rtol=1e-4, atol=1e-5)
    assert one["norm"] == pytest.approx(four["norm"], rel=1e-6)
    trials.steps("data=1", 6, 1)
    assert trials.state("data=1")["digest"] != one["digest"]


def test_only_collectives_are_communication(trials):
    one = trials.communication("data=1", 0, 2)
    four = trials.communication("fsdp=4", 0, 2)
    assert one["share"] == 0 < four["share"] <= 1


def event(op, start, stop, device=0):
    stats = [("device_ordinal", device)] + ([("hlo_op", op)] if op else [])
    return types.SimpleNamespace(
        stats=stats, start_ns=float(start), duration_ns=float(stop - start)
    )


def test_overlaps_count_once():
    events = [
        event("while.1", 0, 6),  # the others run inside of it
        event("all-reduce.3", 1, 3),
        event("all-gather.1", 2, 4),
        event(None, 0, 99),  # a thread that waits
        event("fusion", 6, 8),
        event("all-reduce-start.1", 8, 10, device=1),
        event("all-reduce-done.1", 11, 13, device=1),
    ]
    line = types.SimpleNamespace(events=events)
    plane = types.SimpleNamespace(name="cpu", lines=[line])
    profile = types.SimpleNamespace(planes=[plane])
    assert scale_trial.communication_share(profile) == (3 + 2) / (8 + 4)
    empty = types.SimpleNamespace(planes=[])
    with pytest.raises(ValueError, match="names no operations"):
        scale_trial.communication_share(empty)


def test_a_straggler_delays_each_step(trials):
    assert trials.steps("data=1", 8, 4, 0.25)["seconds"] >= 1
    assert trials.steps("data=1", 8, 4, 0.0)["seconds"] < 1


def test_probes_estimate_the_distance():
    draw = np.random.default_rng(0)
    a = {
        "w": draw.normal(size=(40, 30)).astype(np.float32),
        "b": np.ones(7, np.float32),
    }
    b = {
        "w": a["w"] + 0.01 * draw.normal(size=(40, 30)).astype(np.float32),
        "b": a["b"],
    }
    probes = [scale_trial._probes(tree) for tree in (a, b)]
    exact = np.linalg.norm(b["w"] - a["w"])
    found = np.sqrt(np.mean((np.asarray(probes[0][0]) - np.asarray(probes[1][0])) ** 2))
    assert exact / 2 < found < 2 * exact
    norm = math.sqrt(np.sum(a["w"] ** 2) + 7)
    assert float(probes[0][1]) == pytest.approx(norm, rel=1e-6)


def measured(text, seconds, devices=None, batch=16, **more) -> Measured:
    mesh = ProcessMesh.parse(text)
    state = {"digest": "x", "probes": [1.0, 2.0], "norm": 10.0}
    found = Measured(text, devices or mesh.devices, mesh.processes, batch, **more)
    found.rounds, found.losses = list(seconds), found.losses or [2.0, 1.0]
    found.state = found.state or state
    return found


def result(*meshes, kind="strong", drift=1e-5, platform="gpu") -> Result:
    return Result(kind, 4, drift, 1.5, platform, meshes)


def test_speed_is_compared_within_a_round():
    # The machine was busy in the second round: both were slower then.
    found = result(
        measured("data=1", [1, 10, 1]), measured("data=2", [0.5, 6.25, 0.625])
    )
    assert found.speedup(found.meshes[1]) == (1.6, 1.6, 2.0)
    assert found.efficiency(found.meshes[1]) == 0.8


def test_more_work_in_the_same_time_is_a_speedup():
    one, two = measured("data=1", [1.0]), measured("data=2", [1.25], batch=32)
    found = result(one, two, kind="weak")
    assert found.speedup(two)[0] == 1.6 and found.efficiency(two) == 0.8
    assert found.is_same is None and "not compared" in found.answers()[0]


def test_where_it_stops_paying():
    one, two = measured("data=1", [1.0]), measured("data=2", [0.55])
    four, slow = measured("data=4", [0.4]), measured("fsdp=4", [0.6])
    found = result(one, two, slow, four)
    assert found.stops_paying() == (four, two)  # 1.38, and 1.5 is needed
    assert "Stops paying at 4 devices: data=4 is 1.38 times data=2" in (
        "\n".join(found.answers())
    )
    fast = measured("data=4", [0.3])
    assert result(one, two, fast).stops_paying() is None
    assert "Pays up to 4 devices" in "\n".join(result(one, two, fast).answers())
    assert found.answers()[1] == (
        "Fastest: data=4, 2.50 times data=1 (2.50 to 2.50 in 1 round), 62% of what "
        "its devices could add up to"
    )


def test_whether_it_is_the_same_training():
    one = measured("data=1", [1.0])
    near = measured("data=2", [1.0], losses=[2.0, 1.000001])
    assert result(one, near).is_same
    assert result(one, near).drift_of(near) == pytest.approx(1e-6, rel=1e-3)
    far = measured("data=2", [1.0], losses=[2.0, 1.1])
    assert result(one, far).is_same is False
    assert result(one, far).answers()[0].startswith("Same state: NO; over 2 steps")
    broken = measured("data=2", [1.0], losses=[2.0, math.nan])
    assert result(one, broken).is_same is False
    moved = measured(
        "data=2", [1.0], state={"digest": "y", "probes": [2.0, 2.0], "norm": 10.0}
    )
    assert result(one, moved).distance_of(moved) == pytest.approx(math.sqrt(0.5) / 10)
    assert not result(one, moved).has_same_bits(moved)


def test_what_was_foretold_and_what_a_straggler_costs():
    one = measured("data=1", [1.0], foretold=0.1)
    two = measured("data=2@2", [0.5], not_foretold="unknown")
    two.even_rounds, two.slowed_rounds = [0.5, 1.0], [0.75, 1.4]
    found = result(one, two, platform="cpu")
    assert found.foretold_speedup(two) is None and found.foretold_speedup(one) == 1
    assert two.straggler_cost == pytest.approx(1.45)
    assert found.answers()[-1].endswith("no time: unknown")
    assert "cores of this machine" in found.answers()[-2]
    table = found.table().splitlines()
    assert re.split(r"  +", table[2])[-3:] == ["0.0 %", "1.45", "0.0e+00"]
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["meshes"][1]["straggler_cost"] == pytest.approx(1.45)
    picture = svg(found)
    assert picture.count("<circle") == 5 and "data=2@2  2.00" in picture


def spec(tmp_path, *meshes, processes=(1,), **settings):
    values = {
        "configs": (TINY,),
        "sets": (),
        "batch_size": 16,
        "workdir": tmp_path / "s",
    }
    parsed = tuple(scale.parse_meshes(meshes, processes))
    return scale.Scale(**(values | {"meshes": parsed} | settings))


def test_meshes_and_processes(tmp_path):
    found = scale.parse_meshes(["data=2", "data=4@4"], [1, 2])
    assert [mesh.text for mesh in found] == ["data=2", "data=2@2", "data=4@4"]
    weak = spec(tmp_path, "data=2", "data=4", kind="weak")
    assert [weak.batch_of(mesh) for mesh in weak.meshes] == [16, 32]
    strong = spec(tmp_path, "data=2", "data=4")
    assert [strong.batch_of(mesh) for mesh in strong.meshes] == [16, 16]
    order = [[m.text for m in scale._rotated(found, n)][0] for n in range(4)]
    assert order == ["data=2", "data=2@2", "data=4@4", "data=2"]


@pytest.mark.parametrize(
    ("meshes", "settings", "message"),
    [
        (["data=2"], {}, "--meshes: at least two are compared with each other"),
        (["data=2", "data=2"], {}, "mesh 'data=2' is given twice; remove one"),
        (["data=1", "data=2"], {"rounds": 0}, "--rounds must be >= 1, got 0"),
        (["data=1", "data=2"], {"straggler": 1.0}, "--straggler must be > 1, got 1"),
        (["data=1", "data=2"], {"drift": -1.0}, "--drift must be >= 0, got -1.0"),
        (["data=3", "data=2"], {"kind": "weak"}, "a batch of 16 on 3 does not scale"),
    ],
)
def test_wrong_requests_are_refused(tmp_path, meshes, settings, message):
    with pytest.raises(ValueError) as raised:
        spec(tmp_path, *meshes, **settings)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_workdir_is_never_reused(tmp_path, capsys):
    (tmp_path / "old").write_text("")
    argv = ["scale", "--config", TINY, "--meshes", "data=1", "data=2"]
    assert main([*argv, "--workdir", str(tmp_path)]) == 2
    assert "is not empty. Remove it" in capsys.readouterr().err


def test_accelerators_are_not_shared_between_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "find_machine", lambda *_: Machine("gpu", 8))
    both = spec(tmp_path, "data=2", "data=2@2")
    with pytest.raises(ValueError, match="jobs of 1, 2 processes cannot share the gpu"):
        both.run()


class Slow:
    """Stands for Trials in a worker."""

    def twice(self, number):
        return {"number": 2 * number}

    def refuse(self):
        raise ValueError("no")


def test_a_worker_answers_requests():
    answers = io.StringIO()
    scale_jobs.serve(Slow(), ['["twice", 4]\n', '["refuse"]\n'], answers)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert found == [{"found": {"number": 8}}, {"error": "no"}]
    with pytest.raises(AttributeError):
        scale_jobs.serve(Slow(), ['["none"]\n'], answers)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('lost my way')", "process 0 ended; .*lost my way"),
        ("import time; time.sleep(99)", "process 0 gave no answer within 2 s"),
    ],
)
def test_a_job_that_fails_is_killed(tmp_path, monkeypatch, program, message):
    (tmp_path / "worker.py").write_text(program)
    monkeypatch.setattr(scale_jobs, "WORKER", "worker")
    env = {"PYTHONPATH": str(tmp_path)}
    job = scale_jobs.Job({}, [env], tmp_path / "logs", 2.0)
    with pytest.raises(scale_jobs.JobFailed, match=message), job:
        job.ask("twice", 4)
    (worker,) = job._workers
    assert worker.returncode is not None


@pytest.mark.processes
def test_the_command(tmp_path):
    folder = tmp_path / "scale"
    found = command(
        *("scale", "--config", TINY, "--meshes", "data=1", "fsdp=2@2"),
        *("--rounds", "2", "--steps", "2", "--workdir", str(folder)),
        *("--set", "model.num_layers=1"),
        timeout=280,
        env={"JAX_PLATFORMS": "cpu"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    document = json.loads((folder / "scale.json").read_text())
    assert document["same_state"] is True and document["kind"] == "strong"
    one, two = document["meshes"]
    assert [len(mesh["losses"]) for mesh in (one, two)] == [6, 6]
    assert one["communication_share"] == 0 < two["communication_share"] < 1
    assert one["share_of_parameters_per_device"] == 1
    assert 0.4 < two["share_of_parameters_per_device"] < 0.7
    # Other tests run at the same time, so no speed can be expected.
    assert one["straggler_cost"] is None and two["straggler_cost"] > 0
    assert two["foretold"]["step_seconds"] is None and two["foretold"]["missing"]
    assert one["foretold"]["speedup"] == 1
    assert "Same state: yes; over 6 steps losses differ by" in found.stdout
    assert (folder / "scale.svg").read_text().startswith("<svg")
