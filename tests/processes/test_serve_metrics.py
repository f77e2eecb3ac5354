"""A service in a process of its own, as Prometheus and `serve status` see it."""

import re
import urllib.request

import pytest
from services import Learner, Service, wait
from tiny_runs import command


@pytest.fixture
def service(tmp_path):
    service = Service(tmp_path)
    yield service
    service.close()


def test_one_process_with_both_roles_says_what_it_does(service):
    service.start("--metrics", "0")
    wait(lambda: "metrics at" in service.output())
    found = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", service.output())
    assert found is not None
    learner = Learner(service, 0)
    learner.join()

    def metrics() -> str:
        with urllib.request.urlopen(found[1], timeout=10) as answer:
            return answer.read().decode()

    wait(lambda: 'meshloom_learner_state{job="run",learner="0"' in metrics())
    lines = metrics().splitlines()
    assert "meshloom_leads 1" in lines
    assert "meshloom_received_bytes_total 128" in lines  # the initial parameters
    assert 'meshloom_store_blocks{job="run"} 4' in lines
    status = command("serve", "status", f"{service.address()}/run")
    assert (status.returncode, status.stderr) == (0, "")
    assert "run: waiting for learners, version 0" in status.stdout
    assert re.search(r"^  0 +1 +joined ", status.stdout, re.M)
