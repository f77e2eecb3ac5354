"""`meshloom drill`: faults on real processes of this machine, against a run without.

A fault counts as recovered when the job comes back by itself (or, where a person must
act, by the same command), ends, and what it has computed is what the run without faults
has computed: the same state bit for bit, the same losses, the same samples in the same
updates, none twice.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...sharding.text import align
from ..record import ledger_audit
from ..record.ledger import Ledger
from . import certificate
from .drill_faults import FAULTS, NEEDS_MOUNTS, ON_ANOTHER_MESH
from .drill_job import Failed, Plan, running
from .storage_faults import can_mount

# Of losses on another mesh, over the first steps there, in float32.
DRIFT, DRIFT_STEPS = 1e-5, 20


@dataclasses.dataclass(frozen=True)
class Result:
    """How a fault went.

    Attributes:
      seconds: from the fault to the next step that was new.
      recomputed: steps that were done again.
      mesh: of the job, with its number of processes.
      problem: why it is not recovered; "" if it is.
      skipped: why it could not be tried here; "" if it was.
    """

    fault: str
    mesh: str = ""
    seconds: float | None = None
    recomputed: int | None = None
    state: str = ""
    data: str = ""
    losses: str = ""
    problem: str = ""
    skipped: str = ""

    @property
    def recovered(self) -> bool:
        return not self.problem and not self.skipped


def reference(plan: Plan, folder: Path) -> None:
    """Trains without a fault."""
    with running(plan, folder) as job:
        if status := job.finish():
            raise ValueError(
                f"the run without faults ended with status {status}; see {job.log}. "
                "Fix that before a drill."
            )


def run(
    plan: Plan, workdir: Path, names: Iterable[str], say: Callable[[str], None]
) -> list[Result]:
    """Runs the faults one after the other; keeps the folders of those that failed."""
    say(f"{plan.name}, without faults: {plan.num_steps} steps")
    whole = workdir / "reference"
    reference(plan, whole)
    results = []
    for name in names:
        folder = workdir / name
        result = _try(plan, name, folder, whole)
        say(f"{name}: {_verdict(result)}")
        if result.recovered:
            shutil.rmtree(folder)
        results.append(result)
    return results


def _try(plan: Plan, name: str, folder: Path, whole: Path) -> Result:
    if name in NEEDS_MOUNTS and not can_mount():
        return Result(name, plan.name, skipped="nothing can be mounted here")
    try:
        seconds = FAULTS[name](plan, folder)
    except Failed as error:
        return Result(name, plan.name, problem=str(error))
    found = compare(folder, whole, same_mesh=name not in ON_ANOTHER_MESH)
    return dataclasses.replace(found, fault=name, mesh=plan.name, seconds=seconds)


def compare(folder: Path, whole: Path, *, same_mesh: bool) -> Result:
    """What a run that was struck has computed, against one that was not."""
    found = ledger_audit.audit(folder)
    steps = len(ledger_audit.audit(whole).history)
    data = certificate.data_level(whole, folder, steps)
    problems = [] if data.passed else [f"data: {data.words}"]
    if same_mesh:
        states = {certificate.state_at(path, steps) for path in (folder, whole)}
        state = "bit-equal" if len(states) == 1 else "DIFFERS"
        compared, allowed = range(1, steps + 1), 0.0
    else:
        state = "other mesh"
        compared, allowed = _first_steps_elsewhere(folder, steps), DRIFT
    if state == "DIFFERS":
        problems.append("the last state is another one")
    drift, at = certificate.largest_drift(whole, folder, compared)
    losses = f"{drift:.1e} at step {at}" if drift else "bit-equal"
    if drift is None:
        losses = f"none of step {at}"
        problems.append(f"metrics.jsonl has no loss of step {at}")
    elif drift > allowed:
        problems.append(f"losses differ by {losses}")
    return Result(
        "",
        recomputed=found.repeated,
        state=state,
        data=data.words if data.passed else "DIFFERS",
        losses=losses,
        problem="; ".join(problems),
    )


def _first_steps_elsewhere(folder: Path, steps: int) -> range:
    """Steps after the last restore, as many as the drift is promised for."""
    rows = Ledger(folder, is_writer=False).read()
    start = [row["step"] for row in rows if row["event"] == "restore"][-1]
    return range(start + 1, min(start + DRIFT_STEPS, steps) + 1)


def _verdict(result: Result) -> str:
    if result.skipped:
        return f"not tried: {result.skipped}"
    if result.problem:
        return f"FAILED: {result.problem}"
    return f"recovered in {result.seconds:.1f} s"


def table(results: Sequence[Result]) -> str:
    """What each fault has cost, or, of several meshes, the seconds on each."""
    if len({r.mesh for r in results}) > 1:
        return _by_mesh(results)
    rows = [("fault", "recovered", "seconds", "steps again", "state", "data", "losses")]
    for r in results:
        verdict = "yes" if r.recovered else "not tried" if r.skipped else "NO"
        seconds = "" if r.seconds is None else f"{r.seconds:.1f}"
        again = "" if r.recomputed is None else str(r.recomputed)
        rows.append((r.fault, verdict, seconds, again, r.state, r.data, r.losses))
    return align(rows, right=(2, 3))


def _by_mesh(results: Sequence[Result]) -> str:
    meshes = list(dict.fromkeys(r.mesh for r in results))
    faults = list(dict.fromkeys(r.fault for r in results))
    cells = {(r.fault, r.mesh): _cell(r) for r in results}
    rows = [("seconds to recover", *meshes)]
    rows += [(fault, *(cells[fault, mesh] for mesh in meshes)) for fault in faults]
    recovered = sum(r.recovered for r in results)
    return (
        f"{align(rows, right=tuple(range(1, len(meshes) + 1)))}\n"
        f"{recovered} of {len(results)} recovered: state and losses bit-equal (on "
        f"another mesh, losses to {DRIFT:g}), every sample in the same update, none "
        "twice"
    )


def _cell(result: Result) -> str:
    if result.skipped:
        return "not tried"
    return "FAILED" if result.problem else f"{result.seconds:.1f}"


def write(path: Path, results: Sequence[Result]) -> None:
    rows = [dataclasses.asdict(r) | {"recovered": r.recovered} for r in results]
    path.write_text(json.dumps(rows, indent=1) + "\n")
