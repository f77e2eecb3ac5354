"""`meshloom doctor`: each problem is real, as far as a test can create it."""

import fcntl
import json
import os
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path

import pytest
from tiny_runs import COMMAND, TINY, command, refused

from meshloom.trainer.cli import main
from meshloom.trainer.commands import doctor as cli_doctor
from meshloom.trainer.doctor import findings as doctor
from meshloom.trainer.doctor import machine as doctor_machine
from meshloom.trainer.doctor import network as doctor_network
from meshloom.trainer.doctor import probe as doctor_probe
from meshloom.trainer.doctor import probe_process, storage

CPU = {"JAX_PLATFORMS": "cpu"}


def run(folder: Path, *flags: str, env=CPU, timeout=60):
    """Runs the command; returns (status, findings by subject, seconds)."""
    begin = time.monotonic()
    argv = ("doctor", "--json", "--workdir", str(folder / "run"), *flags)
    found = command(*argv, env=env, timeout=timeout)
    seconds = time.monotonic() - begin
    assert "Traceback" not in found.stderr, found.stderr
    document = json.loads(found.stdout)
    findings = {f["subject"]: doctor.Finding(**f) for f in document["findings"]}
    assert found.returncode == (1 if document["problems"] else 0)
    return found.returncode, findings, seconds


def one(findings) -> doctor.Finding:
    (found,) = findings
    return found


# The whole command.


def test_a_machine_that_is_ready(tmp_path):
    _, found, seconds = run(tmp_path, "--config", TINY)
    # Not every machine that runs tests has a name that resolves.
    problems = {f.subject for f in found.values() if f.level == "problem"}
    assert problems <= {"host name"}, found
    assert seconds < 20  # 5 on a quiet machine
    assert found["jax"].found == metadata.version("jax")
    assert found["devices"].found.endswith("(cpu)")
    assert "examples 512" in found["data"].found
    assert found["run folder"].level in ("ok", "warning")
    assert not (tmp_path / "run").exists()  # nothing is left behind


def test_the_table_says_the_same(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    argv = ["doctor", "--workdir", str(tmp_path / "file" / "run")]
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "problem  run folder" in out and "-> Choose another folder" in out
    assert "problem" in out.splitlines()[-1]


def test_wrong_flags(capfd, tmp_path):
    argv = ["doctor", "--workdir", str(tmp_path)]
    assert "0 to 65535, got 70000" in refused(capfd, [*argv, "--port", "70000"])
    assert "must be > 0, got 0" in refused(capfd, [*argv, "--seconds", "0"])
    assert "give it with --config" in refused(capfd, [*argv, "--set", "a=1"])


# jax.


def test_a_flag_that_xla_does_not_know(tmp_path):
    status, found, _ = run(tmp_path, env={**CPU, "XLA_FLAGS": "--nonsense"})
    assert status == 1 and found["devices"].level == "problem"
    assert "Unknown flag in XLA_FLAGS: --nonsense" in found["devices"].found
    assert "Remove the flag from XLA_FLAGS" in found["devices"].remedy


def broken_jax(folder: Path, source: str) -> dict[str, str]:
    (folder / "jax").mkdir()
    (folder / "jax" / "__init__.py").write_text(source)
    return {**CPU, "PYTHONPATH": str(folder)}


def test_a_jax_that_does_not_start(tmp_path):
    env = broken_jax(tmp_path, "raise ImportError('libcudart.so.12: no such file')")
    status, found, _ = run(tmp_path, "--config", TINY, env=env)
    assert status == 1
    for subject in ("devices", "config"):
        assert "libcudart.so.12: no such file" in found[subject].found
        assert found[subject].remedy


def test_a_driver_that_hangs_does_not_hang_the_doctor(tmp_path):
    env = broken_jax(tmp_path, "import time; time.sleep(100)")
    status, found, seconds = run(tmp_path, "--seconds", "2", env=env)
    assert status == 1 and seconds < 15
    assert found["devices"].found == "jax cannot start: no response within 2 s"
    assert "--seconds" in found["devices"].remedy


@pytest.mark.parametrize(
    "sign, extra", [("dev/nvidia0", "cuda12"), ("dev/accel0", "tpu")]
)
def test_an_accelerator_that_jax_does_not_see(sign, extra, tmp_path):
    (tmp_path / sign).parent.mkdir()
    (tmp_path / sign).write_text("")
    answer = {"count": 1, "kind": "cpu", "platform": "cpu"}
    found = one(doctor_machine.devices(answer, {}, tmp_path))
    assert found.level == "problem" and f"EXTRA={extra}" in found.remedy
    found = one(doctor_machine.devices(answer, CPU, tmp_path))
    assert found.level == "warning" and "JAX_PLATFORMS=cpu requests" in found.remedy
    seen = {"count": 8, "kind": "H100", "platform": "gpu"}
    assert one(doctor_machine.devices(seen, {}, tmp_path)).level == "ok"


# Packages and the machine.


@pytest.fixture
def versions(monkeypatch):
    """Pretends that packages have other versions; None means not installed."""

    def pretend(**others):
        real = metadata.version

        def version(name):
            found = others.get(name, real(name) if name not in others else None)
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(metadata, "version", version)
        return {f.subject: f for f in doctor_machine.installed()}

    return pretend


def test_packages_that_are_old_missing_or_do_not_fit(versions):
    found = versions(jax="0.4.30", optax=None)
    assert found["jax"].level == "warning" and "older than 0.10.2" in found["jax"].found
    assert found["jaxlib"].level == "warning"
    assert "but jax is 0.4.30" in found["jaxlib"].found
    assert found["optax"].level == "problem"
    assert found["optax"].remedy == "pip install 'optax>=0.2.8'"
    assert found["flax"].level == "ok"


def test_not_installed_at_all():
    found = one(doctor_machine.installed("meshloom-of-elsewhere"))
    assert found.level == "problem" and "make install" in found.remedy


def test_little_memory_and_a_limit(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    text = "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:  524288 kB\n"
    (tmp_path / "proc/meminfo").write_text(text)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("2147483648\n")
    found = {f.subject: f for f in doctor_machine.machine(tmp_path)}["memory"]
    assert found.level == "warning"
    assert found.found == "0.5 GiB free of 8.0 GiB; container limit 2.0 GiB"


def test_a_clock_that_stands_in_the_past():
    assert doctor_machine._clock(0.0).level == "warning"
    assert doctor_machine._clock().level == "ok"


# The network.


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        given = {"address": "127.0.0.1", "interface": None, "addresses": []}
        found = one(doctor_network.port(number, **given))
    assert found.level == "problem" and "another --port" in found.remedy
    assert f"127.0.0.1:{number}: Address already in use" in found.found


def test_addresses_and_interfaces():
    def look(**given):
        given = {"address": None, "interface": None, "addresses": [], **given}
        return one(doctor_network.port(0, **given))

    assert look(interface="lo").found.startswith("127.0.0.1:")
    assert look(addresses=["127.0.0.1"]).level == "ok"
    other = look(address="203.0.113.77")
    assert other.level == "problem" and "Cannot assign" in other.found
    missing = look(interface="nonsense0")
    assert missing.level == "problem" and "one of lo" in missing.remedy


def test_host_names():
    assert doctor_network.resolve("localhost")
    assert doctor_network.resolve("no-such-host.invalid") == []
    assert one(doctor_network.host("a", [])).level == "problem"
    assert one(doctor_network.host("a", ["127.0.1.1", "::1"])).level == "warning"
    assert one(doctor_network.host("a", ["127.0.1.1", "10.0.0.2"])).level == "ok"


# The variables of a job.


def place(**environ: str) -> doctor.Finding | None:
    given = {f"MESHLOOM_{name}": value for name, value in environ.items()}
    found = {f.subject: f for f in doctor_network.variables(given)}
    return found.get("distributed")


def test_half_a_place():
    found = place(COORDINATOR="localhost:1", NUM_PROCESSES="2")
    assert found and found.level == "problem"
    assert "MESHLOOM_PROCESS_ID is not set" in found.found
    assert found.remedy.endswith("or none to train alone.")


def test_a_place():
    job = {"COORDINATOR": "localhost:1", "NUM_PROCESSES": "8"}
    found = place(**job, PROCESS_ID="5")
    assert found and found.level == "ok" and found.found.startswith("process 5 of 8")
    found = place(**job, PROCESS_ID="8")
    assert found and found.level == "problem" and "from 0" in found.remedy
    found = place(**job, PROCESS_ID="x")
    assert found and "must be a whole number, got 'x'" in found.found
    job["COORDINATOR"] = "no-such-host.invalid:1"
    found = place(**job, PROCESS_ID="5")
    assert found and "has no address" in found.found
    assert place() is None


def test_variables_are_shown_without_secrets():
    environ = {"JAX_API_KEY": "s3ntinel", "FAKE_TOKEN": "s3ntinel", "NPROC": "8"}
    found = one(doctor_network.variables(environ))
    assert found.found == "JAX_API_KEY=*** NPROC=8"


def test_too_few_threads_and_schedulers():
    environ = {"JAX_NUM_CPU_DEVICES": "8", "NPROC": "4"}
    found = {f.subject: f for f in doctor_network.variables(environ)}["threads"]
    assert found.level == "warning" and found.remedy.startswith("Set NPROC=32")
    inside = {"SLURM_JOB_ID": "7", "OMPI_COMM_WORLD_SIZE": "2"}
    assert one(doctor_network.scheduler(inside)).found == "Slurm and Open MPI"


# Folders.

# The mounts are private to this shell.
IN_A_DISK = """
mount -t tmpfs -o size=256k none "$2" || exit 3
if test $1 = read-only; then mount -o remount,ro "$2" || exit 3; fi
exec "$3" doctor --json --workdir "$2/run"
"""


@pytest.mark.parametrize(
    "disk, message, remedy",
    [
        ("full", "No space left on device", "Free some space"),
        ("read-only", "Read-only file system", "Choose another folder"),
    ],
)
def test_a_disk_that_cannot_be_written(disk, message, remedy, tmp_path):
    # Root needs no user namespace, and some machines do not support them.
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    argv = [*unshare, "sh", "-c", IN_A_DISK, "sh", disk, tmp_path, COMMAND]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1, found.stderr
    findings = {f["subject"]: f for f in json.loads(found.stdout)["findings"]}
    assert findings["run folder"]["level"] == "problem"
    assert message in findings["run folder"]["found"]
    assert remedy in findings["run folder"]["remedy"]


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "run").write_text("mine")
    for path in (tmp_path / "run", tmp_path / "run" / "below"):
        found = one(storage.folder("run folder", path))
        assert found.level == "problem" and "is a file" in found.found
    assert (tmp_path / "run").read_text() == "mine"


def test_a_folder_that_a_run_holds(tmp_path):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = list(storage.folder("run folder", tmp_path))
    assert found[-1].level == "warning" and "is in use by a run" in found[-1].found
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock"]


def test_file_systems(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw\nb {tmp_path} tmpfs rw\nc /other nfs rw\n")
    assert storage.file_system(tmp_path, mounts) == "tmpfs"
    assert storage.file_system(Path("/usr"), mounts) == "ext4"
    found = one(storage.folder("run folder", tmp_path / "run", mounts))
    assert found.level == "warning" and "lost on reboot" in found.remedy


# The config.


def test_a_config_that_cannot_be_used(tmp_path):
    def look(*sets: str) -> dict[str, doctor.Finding]:
        answer = doctor_probe.config([TINY], list(sets))
        return {f.subject: f for f in cli_doctor._config(answer)}

    (tmp_path / "file").write_text("")
    found = look(f"checkpoint_folder='{tmp_path / 'file' / 'saved'}'")
    assert found["data"].level == "ok" and found["checkpoints"].level == "problem"
    found = look("batch_sise=3")
    assert found["config"].level == "problem" and "batch_size" in found["config"].found
    path = f"data.path='{tmp_path / 'nowhere'}'"
    found = look("data=@data.Text()", "data.length=16", path)
    assert found["config"].level == "problem" and "nowhere" in found["config"].found


# A check that raises.


def test_a_check_that_raises_is_a_finding_and_the_rest_still_run():
    def breaks():
        yield doctor.Finding("a", "1")
        raise RuntimeError("out of\nluck")

    checks = [("a", breaks), ("b", lambda: [doctor.Finding("b", "2")])]
    report = doctor.examine(checks)
    assert [f.found for f in report.findings] == [
        *("1", "the check failed: RuntimeError: out of", "2")
    ]
    assert report.count("problem") == 1


def test_the_probe_and_the_doctor_agree_on_the_mark():
    assert doctor_probe.MARK == probe_process.MARK


def test_the_line_that_explains_a_crash():
    trace = "Traceback\n  File x\nImportError: libcudart\nDuring handling\n  more"
    assert probe_process.reason(trace) == "ImportError: libcudart"
    assert probe_process.reason("a\n\nlast words\n") == "last words"
