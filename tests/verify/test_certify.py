"""The certificate: what it says of runs that continue exactly, and of others."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import TINY, command, main, refused, sets_of

from meshloom.launch import once
from meshloom.trainer.checkpoint import manifest
from meshloom.trainer.record import metrics
from meshloom.trainer.verify import certificate, certify, checkpoint_faults
from meshloom.trainer.verify.certify_meshes import Machine, Target, choose

STEPS, SAVE_AT = 6, 3
# A pipeline that keeps layers in another order than on disk.
SETS = ("model.num_layers=4", 'pipeline.schedule="interleaved"')
MESHES = ("tensor=2", "pipe=2", "data=2@2")
FOLDERS = ("1-tensor-2", "2-pipe-2", "3-data-2-2")


def flags(*meshes, steps=STEPS, save_at=SAVE_AT, sets=SETS) -> list[str]:
    counts = ["--steps", str(steps), "--save-at", str(save_at)]
    argv = ["certify", "--config", TINY, *sets_of(*sets), *counts]
    return [*argv, "--meshes", *meshes]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where the runs of a certificate lie, and how the command ended."""
    folder = tmp_path_factory.mktemp("certify")
    where = ["--workdir", str(folder / "runs"), "--json", str(folder / "copy.json")]
    found = command(*flags(*MESHES), *where, timeout=280, env={"JAX_PLATFORMS": "cpu"})
    return folder / "runs", found


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.mark.processes
def test_a_run_continues_exactly_on_every_mesh(runs):
    folder, found = runs
    assert found.returncode == 0, found.stdout + found.stderr
    document = json.loads((folder / certify.FILE).read_text())
    assert json.loads((folder.parent / "copy.json").read_text()) == document
    assert document["passed"]
    assert [row["mesh"] for row in document["meshes"]] == [*MESHES]
    saved = document["reference"]["saved_state"]
    for row in document["meshes"]:
        assert row["state"]["restored"] == saved
        assert row["data"]["steps"] == STEPS
        assert row["trajectory"]["largest_drift"] <= 1e-5
    same = document["meshes"][0]["trajectory"]
    assert same["words"] == "bit-equal"
    assert same["final_state"] == document["reference"]["final_state"] != saved
    # What was changed for these runs is said, and each run is named as it begins.
    assert "--set eval_batches=0 --set sample_prompt=None" in found.stdout
    assert "mesh 3 of 3: data=2@2, from step 3 to 6 ..." in found.stdout
    assert found.stdout.endswith("hold on each of 3 meshes\n")


@pytest.mark.processes
def test_runs_were_on_the_meshes_that_they_are_named_after(runs):
    starts = []
    for name in FOLDERS:
        rows = metrics.read(runs[0] / name / "ledger.jsonl")
        starts.append([row for row in rows if row["event"] == "start"][-1])
    assert [row["mesh"] for row in starts] == [{"tensor": 2}, {"pipe": 2}, {"data": 2}]
    assert [row["processes"] for row in starts] == [1, 1, 2]
    assert [row["devices"] for row in starts] == [2, 2, 2]


@pytest.mark.processes
def test_a_copy_holds_nothing_later(runs, tmp_path):
    certify.copy_at(runs[0] / "reference", tmp_path / "copy", SAVE_AT)
    copy = tmp_path / "copy"
    assert [path.name for path in (copy / "checkpoints").iterdir()] == [str(SAVE_AT)]
    assert [row["step"] for row in metrics.read(copy / "metrics.jsonl")] == [1, 2, 3]
    rows = metrics.read(copy / "ledger.jsonl")
    assert [row["step"] for row in rows if row["event"] == "step"] == [1, 2, 3]
    assert max(row.get("step", 0) for row in rows) == SAVE_AT
    assert rows[0]["event"] == "start" and "done" not in {r["event"] for r in rows}


# Each level is seen to fail.


def change_rows(folder: Path, file: str, change) -> None:
    """Replaces each row by what `change` gives; None leaves it out."""
    rows = [change(row) for row in metrics.read(folder / file)]
    text = "".join(json.dumps(row) + "\n" for row in rows if row is not None)
    (folder / file).write_text(text)


def in_ledger(event, step=None, **fields):
    def change(row):
        is_it = row["event"] == event and step in (None, row["step"])
        return row | fields if is_it else row

    return lambda folder: change_rows(folder, "ledger.jsonl", change)


def loss_times(factor):
    def change(row):
        return row | {"loss": row["loss"] * factor} if row["step"] == 5 else row

    return lambda folder: change_rows(folder, "metrics.jsonl", change)


def without(file, step):
    def change(row):
        return None if row.get("event") != "done" and row.get("step") == step else row

    return lambda folder: change_rows(folder, file, change)


def restored(step):
    """Another step, or nothing, was restored."""

    def change(row):
        if row["event"] != "restore":
            return row
        return row | {"step": step} if step else None

    return lambda folder: change_rows(folder, "ledger.jsonl", change)


def other_end(folder):
    file = folder / "checkpoints" / str(STEPS) / manifest.ITEM / "metadata"
    found = json.loads(file.read_text())
    found["arrays"]["params/embedding"]["digest"] = "0" * 16
    file.write_text(json.dumps(found))


ULP = 1 + 2**-23  # of a float32, or a little more
# {what was changed: (how, the levels that fail, a part of the first one's words)}
ON_ANY_MESH = {
    "another state": (in_ledger("restore", state="0" * 16), "state", "0" * 16),
    # The audit then misses steps.
    "nothing restored": (restored(None), "state data", "the run began anew"),
    "another step": (restored(2), "state data", "step 2 was restored, expected 3"),
    "other samples": (in_ledger("step", 5, samples="0" * 16), "data", "step 5"),
    "a step left out": (in_ledger("step", 5, skipped=True), "data", "left out"),
    "a step missing": (without("ledger.jsonl", 6), "data", "step 6 has no row"),
    "no loss": (without("metrics.jsonl", 6), "trajectory", "no loss of step 6"),
    "another loss": (loss_times(1.0001), "trajectory", "1.0e-04 at step 5, allowed"),
    "no number": (loss_times(float("nan")), "trajectory", "inf at step 5"),
}
ON_THE_SAME = {
    "the last bit": (loss_times(ULP), "trajectory", "same mesh, but the loss differs"),
    "another end": (other_end, "trajectory", "the last state has digest"),
}


def judged(runs, folder: Path, drift: float | None) -> dict[str, certificate.Level]:
    reference = runs[0] / "reference"
    return certificate.judge(
        reference, folder, save_at=SAVE_AT, steps=STEPS, drift=drift
    )


def copied(runs, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs[0] / name, tmp_path / "copy"))


@pytest.mark.processes
@pytest.mark.parametrize("name", ON_ANY_MESH)
def test_each_level_is_seen_to_fail(name, runs, tmp_path):
    harm, levels, words = ON_ANY_MESH[name]
    folder = copied(runs, "2-pipe-2", tmp_path)
    assert all(x.passed for x in judged(runs, folder, 1e-5).values())
    harm(folder)
    found = judged(runs, folder, 1e-5)
    assert [key for key, x in found.items() if not x.passed] == levels.split()
    level = levels.split()[0]
    assert words in found[level].words
    row = certificate.Row("pipe=2", 2, 1, 1.0, found)
    assert not row.passed
    assert f"pipe=2, {level}: {found[level].words}" in certificate.table([row])


@pytest.mark.processes
@pytest.mark.parametrize("name", ON_THE_SAME)
def test_the_same_mesh_must_be_bit_equal(name, runs, tmp_path):
    harm, level, words = ON_THE_SAME[name]
    folder = copied(runs, "1-tensor-2", tmp_path)
    harm(folder)
    assert all(x.passed for x in judged(runs, folder, 1e-5).values())
    found = judged(runs, folder, None)
    assert [key for key, x in found.items() if not x.passed] == [level]
    assert words in found[level].words


@pytest.mark.processes
def test_a_flipped_bit_fails_the_state(runs, tmp_path):
    target = Target.parse("tensor=2")
    job = certify.Certify(
        configs=(TINY,),
        sets=SETS,
        targets=(target,),
        workdir=tmp_path,
        steps=STEPS,
        save_at=SAVE_AT,
    )
    shutil.copytree(runs[0] / "reference", job.reference)
    certify.copy_at(job.reference, tmp_path / "copy", SAVE_AT)
    checkpoint_faults.flip_a_bit(tmp_path / "copy" / "checkpoints" / str(SAVE_AT))
    row = job.resume(target, tmp_path / "copy")
    assert not row.levels["state"].passed
    words = row.levels["state"].words
    assert words.startswith("nothing was restored: ") and "not what was saved" in words


@pytest.mark.processes
def test_a_failure_is_status_1(runs, tmp_path, monkeypatch, capfd):
    """One mesh of a finished certificate is harmed, and one run dies."""

    def train(job, target, folder):
        if target.devices == 8:
            return once.Outcome(1.0, "worker 0 was killed")
        name = "2-pipe-2" if target.text == "pipe=2" else folder.name
        shutil.copytree(runs[0] / name, folder, dirs_exist_ok=True)
        if target.text == "pipe=2":
            loss_times(2.0)(folder)
        return once.Outcome(1.0)

    monkeypatch.setattr(certify.Certify, "_train", train)
    argv = [*flags("tensor=2", "fsdp=8", "pipe=2"), "--workdir", str(tmp_path)]
    assert main(argv) == 1
    output = capfd.readouterr().out
    assert f"fsdp=8: worker 0 was killed ({tmp_path}/2-fsdp-8/logs)" in output
    assert "pipe=2, trajectory: the loss differs by 1.0e+00 at step 5" in output
    assert output.endswith("certify: FAILED on fsdp=8, pipe=2\n")
    document = json.loads((tmp_path / certify.FILE).read_text())
    assert [row["passed"] for row in document["meshes"]] == [True, False, False]


@pytest.mark.processes
def test_a_reference_that_went_back_is_none(runs, tmp_path, monkeypatch, capfd):
    def train(job, target, folder):
        shutil.copytree(runs[0] / "reference", folder)
        with open(folder / "ledger.jsonl", "a") as file:
            file.write('{"event": "rewind", "step": 3, "skipped_batches": [3, 5]}\n')
        return once.Outcome(1.0)

    monkeypatch.setattr(certify.Certify, "_train", train)
    assert main([*flags("tensor=2", "fsdp=8"), "--workdir", str(tmp_path)]) == 1
    assert "the reference went back to step 3 (rewind)" in capfd.readouterr().err


def test_a_reference_that_dies_is_status_1(tmp_path, monkeypatch, capfd):
    died = once.Outcome(1.0, "worker 0 was killed")
    monkeypatch.setattr(once, "run", lambda *_, **__: died)
    assert main([*flags("fsdp=8"), "--workdir", str(tmp_path)]) == 1
    error = capfd.readouterr().err
    assert error == "meshloom: the reference on fsdp=8: worker 0 was killed\n"


# Bad input.

BAD = {
    "tensor=8": "mesh 'tensor=8': ",
    "data=8@3": "mesh 'data=8@3': its 8 devices cannot be divided among 3 processes",
    "data=8@x": "mesh 'data=8@x': expected a number of processes after @, found 'x'",
    "data=-1": "mesh 'data=-1': a certificate is of one mesh, so no axis may be -1",
    "rows=8": "'rows' is no mesh axis",
    "fsdp=8@1": "mesh 'fsdp=8' is given twice",
    "pipe=8": "mesh 'pipe=8': mesh axis pipe=8: ",
}


@pytest.mark.parametrize("mesh", BAD)
def test_an_impossible_mesh_is_refused_before_anything_runs(mesh, tmp_path, capfd):
    workdir = tmp_path / "runs"
    argv = [*flags("fsdp=8", mesh), "--workdir", str(workdir)]
    assert BAD[mesh] in refused(capfd, argv)
    assert not workdir.exists()


def test_other_bad_input(tmp_path, capfd):
    where = ["--workdir", str(tmp_path)]
    argv = flags("fsdp=8", steps=3, save_at=3)
    error = refused(capfd, [*argv, *where])
    assert error.startswith("--save-at 3 must be at least 1 and less than --steps 3")
    argv = flags("fsdp=8", sets=("mesh.data=2",))
    assert "--meshes and --set mesh.data=2 both" in refused(capfd, [*argv, *where])
    (tmp_path / "notes").touch()
    assert "is not empty. Remove it" in refused(capfd, [*flags("fsdp=8"), *where])


def test_what_only_the_run_can_know_is_bad_input_too(tmp_path, monkeypatch, capfd):
    refusal = once.Outcome(1.0, "worker 0 ended with status 2: no such thing", True)
    monkeypatch.setattr(once, "run", lambda *_, **__: refusal)
    error = refused(capfd, [*flags("fsdp=8"), "--workdir", str(tmp_path)])
    assert error == "mesh 'fsdp=8': worker 0 ended with status 2: no such thing"


# Where the runs are.


def test_processes_share_the_devices_of_a_mesh():
    envs = Machine().environments(Target.parse("data=2,tensor=2@2"), port=1)
    assert [env["JAX_NUM_CPU_DEVICES"] for env in envs] == ["2", "2"]
    assert [env["MESHLOOM_PROCESS_ID"] for env in envs] == ["0", "1"]
    assert all(int(env["NPROC"]) >= 8 for env in envs)
    (env,) = Machine().environments(Target.parse("data=4"), port=1)
    assert env["JAX_NUM_CPU_DEVICES"] == "4" and "MESHLOOM_COORDINATOR" not in env
    envs = Machine("gpu", 8).environments(Target.parse("data=4@2"), port=1)
    assert [env["JAX_CUDA_VISIBLE_DEVICES"] for env in envs] == ["0,1", "2,3"]


def test_accelerators_are_taken_where_all_meshes_fit():
    said = []
    targets = [Target.parse("fsdp=4"), Target.parse("data=2@2")]
    assert choose("cpu", 1, targets, said.append) == Machine() and not said
    assert choose("gpu", 8, targets, said.append) == Machine("gpu", 8) and not said
    assert choose("gpu", 2, targets, said.append) == Machine()
    assert choose("tpu", 4, targets, said.append) == Machine()
    assert choose("tpu", 4, targets[:1], said.append) == Machine("tpu", 4)
    assert said == [
        "On the CPU: there are 2 gpu devices, and mesh fsdp=4 needs 4",
        "On the CPU: there are 4 tpu devices, and mesh data=2@2 is not all of them in "
        "one process",
    ]


# The long form: pairs of a mesh that saves and one that goes on.

LONG = {
    "1f1b": (
        *("fsdp=8", "data=1", "tensor=2", "data=2@2", "data=4@4", "fsdp=4@2"),
        *("data=2,tensor=2", "data=2,tensor=4", "data=2,fsdp=2,tensor=2@2"),
        *("pipe=2@2", "pipe=2,tensor=2", "pipe=2,fsdp=2,tensor=2", "pipe=4,data=2@4"),
    ),
    "interleaved": (
        *("pipe=2,fsdp=2,tensor=2", "data=1", "fsdp=8@4", "tensor=4", "data=8@2"),
        *("pipe=2", "pipe=2,data=2@2"),
    ),
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", LONG)
def test_many_pairs_of_meshes(schedule, tmp_path):
    sets = ("model.num_layers=4", f'pipeline.schedule="{schedule}"')
    argv = flags(*LONG[schedule], steps=20, save_at=10, sets=sets)
    env = {"JAX_PLATFORMS": "cpu"}
    found = command(*argv, "--workdir", str(tmp_path / "runs"), timeout=3500, env=env)
    print(found.stdout)
    assert found.returncode == 0, found.stdout + found.stderr
