"""`meshloom drill`: injects faults into real processes and checks that jobs recover.

A job has recovered from a fault if it resumes by itself (or, where the user must fix
something first, when the same command is run again), finishes, and has computed what
the run without faults computed: a bit-equal state, the same losses, and the same
samples in the same updates, none of them twice.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...sharding.text import align
from ..program import executables
from ..record import ledger_audit
from ..record.ledger import Ledger
from . import certificate
from .drill_faults import FAULTS, NEEDS_MOUNTS, ON_ANOTHER_MESH
from .drill_job import Failed, JobSpec, running
from .storage_faults import can_mount

# Allowed relative difference of float32 losses over the first steps on another mesh.
DRIFT, DRIFT_STEPS = 1e-5, 20


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one fault.

    Attributes:
      fault: the name of the fault.
      mesh: the mesh of the job, with its number of processes.
      seconds: the time from the fault to the next step that was not done before.
      recomputed: the number of steps that were done again.
      state: how the final state compares with the run without faults.
      data: how the samples compare.
      losses: how the losses compare.
      problem: why the job did not recover; "" if it did.
      skipped: why the fault could not be injected here; "" if it was.
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


def train_reference(spec: JobSpec, folder: Path, *, before: str = "a drill") -> None:
    """Trains without faults."""
    with running(spec, folder) as job:
        if status := job.finish():
            raise ValueError(
                f"the run without faults exited with status {status}; see {job.log}. "
                f"Fix that before running {before}."
            )


def run(
    spec: JobSpec, workdir: Path, names: Iterable[str], log: Callable[[str], None]
) -> list[Result]:
    """Injects the faults one by one; keeps the folders of those that failed."""
    log(f"{spec.name}, without faults: {spec.num_steps} steps")
    reference = workdir / "reference"
    train_reference(spec, reference)
    results = []
    for name in names:
        folder = workdir / name
        # The same programs: compiling them would take most of the time of a drill.
        if (compiled := reference / executables.FOLDER).exists():
            shutil.copytree(compiled, folder / executables.FOLDER)
        result = _try(spec, name, folder, reference)
        log(f"{name}: {_verdict(result)}")
        if result.recovered:
            shutil.rmtree(folder)
        results.append(result)
    return results


def _try(spec: JobSpec, name: str, folder: Path, reference: Path) -> Result:
    if name in NEEDS_MOUNTS and not can_mount():
        return Result(name, spec.name, skipped="cannot mount file systems here")
    try:
        seconds = FAULTS[name](spec, folder)
    except Failed as error:
        return Result(name, spec.name, problem=str(error))
    found = compare(folder, reference, same_mesh=name not in ON_ANOTHER_MESH)
    return dataclasses.replace(found, fault=name, mesh=spec.name, seconds=seconds)


def compare(folder: Path, reference: Path, *, same_mesh: bool) -> Result:
    """Compares what a run with faults computed with the run without."""
    found = ledger_audit.audit(folder)
    steps = len(ledger_audit.audit(reference).history)
    data = certificate.data_level(reference, folder, steps)
    problems = [] if data.passed else [f"data: {data.summary}"]
    if same_mesh:
        states = {certificate.state_at(path, steps) for path in (folder, reference)}
        state = "bit-equal" if len(states) == 1 else "DIFFERS"
        compared, allowed = range(1, steps + 1), 0.0
    else:
        state = "other mesh"
        compared, allowed = _first_steps_elsewhere(folder, steps), DRIFT
    if state == "DIFFERS":
        problems.append("the final state differs")
    drift, at = certificate.largest_drift(reference, folder, compared)
    losses = f"{drift:.1e} at step {at}" if drift else "bit-equal"
    if drift is None:
        losses = f"none for step {at}"
        problems.append(f"metrics.jsonl has no loss for step {at}")
    elif drift > allowed:
        problems.append(f"losses differ by {losses}")
    return Result(
        "",
        recomputed=found.repeated,
        state=state,
        data=data.summary if data.passed else "DIFFERS",
        losses=losses,
        problem="; ".join(problems),
    )


def _first_steps_elsewhere(folder: Path, steps: int) -> range:
    """Returns the steps after the last restore for which the drift is bounded."""
    rows = Ledger(folder, is_writer=False).read()
    start = [row["step"] for row in rows if row["event"] == "restore"][-1]
    return range(start + 1, min(start + DRIFT_STEPS, steps) + 1)


def _verdict(result: Result) -> str:
    if result.skipped:
        return f"skipped: {result.skipped}"
    if result.problem:
        return f"FAILED: {result.problem}"
    return f"recovered in {result.seconds:.1f} s"


def table(results: Sequence[Result]) -> str:
    """Formats the outcome of each fault or, for several meshes, the seconds on each."""
    if len({r.mesh for r in results}) > 1:
        return _by_mesh(results)
    rows = [
        ("fault", "recovered", "seconds", "steps redone", "state", "data", "losses")
    ]
    for r in results:
        verdict = "yes" if r.recovered else "skipped" if r.skipped else "NO"
        seconds = "" if r.seconds is None else f"{r.seconds:.1f}"
        redone = "" if r.recomputed is None else str(r.recomputed)
        rows.append((r.fault, verdict, seconds, redone, r.state, r.data, r.losses))
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
        f"another mesh, losses within {DRIFT:g}), every sample used once, in the same "
        "update"
    )


def _cell(result: Result) -> str:
    if result.skipped:
        return "skipped"
    return "FAILED" if result.problem else f"{result.seconds:.1f}"


def write(path: Path, results: Sequence[Result]) -> None:
    """Writes the results as JSON."""
    rows = [dataclasses.asdict(r) | {"recovered": r.recovered} for r in results]
    path.write_text(json.dumps(rows, indent=1) + "\n")
