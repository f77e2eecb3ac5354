"""examples/recommender.py against a real service that is killed in the middle."""

import json
import os
import signal
import subprocess
import sys

import pytest
from paths import ROOT
from services import Service, wait

EXAMPLE = str(ROOT / "examples" / "recommender.py")
SIZES = ["--users", "60", "--items", "40", "--width", "4", "--batch", "256"]
LIMIT = 400
pytestmark = [pytest.mark.fleets, pytest.mark.slow, pytest.mark.timeout(4 * LIMIT)]


def learner(service: Service) -> subprocess.Popen:
    argv = ["--exchange", f"{service.address()}/rec", "--learner", "0/1", *SIZES]
    return subprocess.Popen(
        [sys.executable, EXAMPLE, *argv, "--rounds", "60"],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_service_continues_from_its_tables_and_the_log_replays(tmp_path):
    """The short form, without a death, is in tests/service/test_tables.py."""
    service = Service(tmp_path)
    processes = []
    try:
        service.start("--save-every", "10", "--once")
        processes.append(learner(service))
        wait((service.home() / "rec" / "service" / "20").exists, LIMIT)
        os.killpg(service.processes[-1].pid, signal.SIGKILL)
        service.processes[-1].wait()
        processes[0].kill()
        processes[0].communicate()
        service.start("--save-every", "10", "--once")
        processes.append(learner(service))
        output, _ = processes[1].communicate(timeout=LIMIT)
        assert processes[1].returncode == 0, service.output()
        found = json.loads(output.splitlines()[-1])
        assert found["held_out_rmse"] < 2 * found["noise"], found
        assert service.processes[-1].wait(LIMIT) == 0, service.output()
    finally:
        for process in processes:
            process.kill()
            process.wait()
        service.close()
    assert "continues from version" in service.output()
    folder = service.home() / "rec"
    rows = [json.loads(x) for x in (folder / "commits.jsonl").read_text().splitlines()]
    who = {part["incarnation"] for row in rows for part in row["contributions"]}
    assert [row["version"] for row in rows] == [*range(1, 61)] and who == {1, 2}
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--replay", str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.stdout == "all arrays are bit-equal\n", done.stdout + done.stderr
