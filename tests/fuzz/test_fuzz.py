"""A minute of the fuzzer, the same cases every time; `make fuzz` tries others."""

import collections
import dataclasses
import sys

import fuzz_worker
import pytest
from fuzz_cases import Case, Layout
from fuzz_explore import explore
from fuzz_legal import cases
from fuzz_spoiled import spoiled

NUM_CASES = 10
# Of all cases; those that were made to be refused are one in eight.
MOST_REFUSED = 0.3


@pytest.mark.timeout(1200)  # a failing case is shrunk, for at most 300 s
def test_products_train_as_one_device_does():
    worker, counts = fuzz_worker.Worker(), collections.Counter()

    def run(case: Case) -> fuzz_worker.Outcome:
        outcome = worker.run(case)
        counts[outcome.status] += 1
        return outcome

    try:
        failed = explore(run, cases(), num_cases=NUM_CASES)
    finally:
        worker.close()
    if failed:
        case, outcome = failed
        pytest.fail(f"{outcome.message}\nRun it again: {case.command}")
    assert counts.total() == NUM_CASES, counts
    assert counts["refused"] <= MOST_REFUSED * NUM_CASES, counts


@pytest.mark.processes
def test_a_product_over_two_processes():
    case = Case(
        batch_size=8,
        data="packed",
        model={"num_layers": 2, "num_heads": 2, "num_kv_heads": 2},
        layout=Layout(
            mesh="pipe=2,fsdp=2", plan="data+fsdp+pipeline", num_microbatches=2
        ),
        resume=Layout(mesh="fsdp=2,tensor=2", plan="data+fsdp+tensor"),
        processes=2,
    )
    outcome = fuzz_worker.run_processes(case, fuzz_worker.LIMIT)
    assert outcome.status == "ok", f"{outcome.message}\nRun it again: {case.command}"


def test_every_process_has_devices_in_every_layout():
    def run(case: Case) -> fuzz_worker.Outcome:
        sizes = {layout.num_devices for layout in case.layouts}
        return fuzz_worker.Outcome("ok" if len(sizes) == 1 else "failed", str(sizes))

    case = Case(layout=Layout(mesh="data=2"), resume=Layout(mesh="fsdp=2"), processes=2)
    assert explore(run, spoiled(case), num_cases=20) is None


def test_a_failing_case_is_shrunk_to_what_makes_it_fail():
    def run(case: Case) -> fuzz_worker.Outcome:
        bad = case.layout.sizes.get("fsdp", 1) > 2 and case.optimizer == "Muon"
        return fuzz_worker.Outcome("failed" if bad else "ok", "three and more")

    found = explore(run, cases(), num_cases=200)
    assert found is not None
    case, outcome = found
    assert case.layout.mesh == "fsdp=3" and case.optimizer == "Muon"
    assert case.resume is None and not case.spoiled and case.data == "ones"
    assert outcome.message == "three and more"
    is_known = {outcome.kind}.__contains__
    known = explore(run, cases(), num_cases=20, is_known=lambda o: is_known(o.kind))
    assert known is None


def test_a_case_is_the_same_after_the_command_line():
    layout = Layout(mesh="pipe=2,fsdp=3", plan="data+fsdp+pipeline")
    case = Case(model={"d_model": 12}, layout=layout, resume=Layout(mesh="data=5"))
    assert Case.from_json(case.to_json()) == case
    assert "resume" not in dataclasses.replace(case, resume=None).command
    assert case.command.startswith("python tests/fuzz '{")


@pytest.mark.parametrize(
    "code, status",
    {
        "input(); raise SystemExit(3)": "crashed",
        "import time; time.sleep(60)": "hung",
    }.items(),
)
def test_a_worker_that_is_lost_is_replaced(code, status):
    """Whatever a case does to its process, it has an outcome, and so has the next."""
    worker = fuzz_worker.Worker(limit=2, argv=[sys.executable, "-c", code])
    try:
        for _ in range(2):
            outcome = worker.run(Case())
            assert outcome.status == status and not outcome.is_good, outcome
    finally:
        worker.close()


def test_an_error_of_jax_is_not_ours():
    import jax.numpy as jnp

    from meshloom.sharding import parse_plan

    with pytest.raises(ValueError) as ours:
        parse_plan("nothing")
    with pytest.raises(ValueError) as theirs:
        jnp.concatenate([])
    assert fuzz_worker.is_ours(ours.value)
    assert not fuzz_worker.is_ours(theirs.value)
