"""`meshloom plan schedule`: a pipeline's schedule as a picture and in figures."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from ...sharding.pipeline import picture
from ...sharding.pipeline.schedule import NAMES, Schedule, make
from ...sharding.pipeline.simulate import GATHERS, Simulation, Sizes, compare, simulate
from ...sharding.text import align, counted, human_bytes, percent

INTERLEAVED = "interleaved"
MANY_STAGES = 16
UNKNOWN = "?"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A schedule, and what other choices would cost.

    Attributes:
      schedules: all schedules that the layers allow, with the same remat.
      policies: the same schedule with other remat policies.
      gathers: the same, by how often weights are gathered; none without sizes.
      notes: what was left out, and why.
    """

    schedule: Schedule
    chosen: Simulation
    schedules: Sequence[Simulation]
    policies: Sequence[Simulation]
    gathers: Sequence[Simulation]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        tables = {
            "schedules": self.schedules,
            "remat": self.policies,
            "gather": self.gathers,
        }
        return {
            **{name: [row.to_json() for row in rows] for name, rows in tables.items()},
            "schedule": self.chosen.to_json(),
            "notes": [*self.notes],
        }


def compare_choices(
    schedule: Schedule, num_chunks: int | None, *, remat: str, sizes: Sizes
) -> Comparison:
    """Compares a schedule with others of the same stages and microbatches.

    Args:
      num_chunks: of interleaved, whatever `schedule` is.
    """
    found = simulate(schedule, remat=remat, sizes=sizes)
    names, notes = _comparable(schedule.name, num_chunks, sizes.layers_per_stage)
    shape = schedule.num_stages, schedule.num_microbatches, num_chunks
    schedules = compare(*shape, names=names, remat=remat, sizes=sizes)
    saving = "save-dots" if remat == "save-dots" else "save-named"
    policies = [
        simulate(schedule, remat=remat, sizes=sizes)
        for remat in ("none", saving, "full")
    ]
    gathers = [
        simulate(schedule, remat=remat, gather=gather, sizes=sizes)
        for gather in GATHERS
        if sizes.weight_bytes is not None
    ]
    return Comparison(schedule, found, schedules, policies, gathers, notes)


def show(found: Comparison, *, as_json: bool = False) -> None:
    """Prints the picture, the facts, and what other choices would cost."""
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
        return
    _print_picture(found.schedule)
    chosen, gathers = found.chosen, found.gathers
    names = [_mark(_title(r), r.name == chosen.name) for r in found.schedules]
    tables = [_table("schedule", names, found.schedules, SCHEDULES)]
    names = [_mark(row.remat, row.remat == chosen.remat) for row in found.policies]
    tables.append(_table("remat", names, found.policies, POLICIES))
    if gathers:
        names = [f"once a {row.gather}" for row in gathers]
        tables.append(_table("weights gathered", names, gathers, GATHERED))
    print()
    print(_facts(chosen), *tables, *found.notes, sep="\n\n")


def _comparable(
    name: str, num_chunks: int | None, layers: int | None
) -> tuple[Sequence[str], tuple[str, ...]]:
    """Returns the schedules that these layers allow, and a line for those left out."""
    chunks = make(INTERLEAVED, 1, 1, num_chunks).num_chunks
    if name == INTERLEAVED or not layers or layers % chunks == 0:
        return NAMES, ()
    note = (
        f"{INTERLEAVED} is left out: {layers} layers a stage cannot be split into "
        f"{chunks} chunks. Give --chunks a number that divides them."
    )
    return [name for name in NAMES if name != INTERLEAVED], (note,)


def _print_picture(schedule: Schedule) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    words = picture.text(schedule, console.width, color=console.is_terminal)
    # Through rich, which knows the terminal's colours.
    console.print(Text.from_ansi(words), soft_wrap=True)


def _facts(found: Simulation) -> str:
    S, M, R = found.num_stages, found.num_microbatches, found.num_chunks
    chunks = f" of {R} chunks" if R > 1 else ""
    live = ", ".join(map(str, found.live[:MANY_STAGES]))
    live += ", ..." if S > MANY_STAGES else ""
    rows = [
        ("schedule", f"{found.name}, stages {S}{chunks}, microbatches {M}"),
        ("remat", f"{found.remat}, {_forwards(found)} a microbatch"),
        (
            "ticks",
            f"{found.num_ticks}: {found.forward_ticks} with forwards, "
            f"{found.backward_ticks} with backwards",
        ),
        (
            "cost",
            f"{found.cost:g} forwards of a microbatch through a stage, "
            f"{found.ideal:g} of them useful",
        ),
        ("bubble", percent(found.bubble)),
        ("saved inputs", f"at most {max(found.live)} on a stage; by stage: {live}"),
    ]
    if S > 1:
        forwards, backwards = found.sends
        sent = {
            "ring": f"{forwards} activations to the next stage, {backwards} to the one "
            "before",
            "outside": f"{found.boundary_transfers} useful transfers of {S - 1}/{S} "
            "activation, for embedding and head",
        }
        sizes = found.traffic.ring, found.traffic.boundary
        for (name, words), size in zip(sent.items(), sizes, strict=True):
            more = "" if size is None else f": {human_bytes(size)}"
            rows.append((name, words + more))
    return align(rows)


def _table(
    title: str, names: Sequence[str], rows: Sequence[Simulation], columns: Sequence[str]
) -> str:
    """Returns a table with the columns of which all cells are known."""
    cells = [(name, *map(COLUMNS[name], rows)) for name in columns]
    known = [(title, *names), *(column for column in cells if UNKNOWN not in column)]
    return align(list(zip(*known, strict=True)), right=range(1, len(known)))


def _memory(row: Simulation) -> str:
    """Returns memory of inputs and residuals; in layers if their size is unknown."""
    inputs, residuals = row.memory.inputs, row.memory.residuals
    if inputs is None:
        return UNKNOWN
    if residuals is not None:
        return human_bytes(inputs + residuals)
    count = row.kept_layers
    rest = "residuals" if count is None else counted(count, "layer")
    return f"{human_bytes(inputs)} + {rest}"


def _title(row: Simulation) -> str:
    return f"{row.name}, {row.num_chunks} chunks" if row.num_chunks > 1 else row.name


def _mark(name: str, is_chosen: bool) -> str:
    return f"{'*' if is_chosen else ' '} {name}"


def _forwards(row: Simulation) -> str:
    return f"{1 + row.backward_cost} forwards"


def _known(count: int | None, show: Callable[[int], str] = str) -> str:
    return UNKNOWN if count is None else show(count)


COLUMNS: dict[str, Callable[[Simulation], str]] = {
    "ticks": lambda row: str(row.num_ticks),
    "a microbatch": _forwards,
    "cost": lambda row: f"{row.cost:g}",
    "bubble": lambda row: percent(row.bubble),
    "work/useful": lambda row: f"{row.ratio:.3f}",
    "saved inputs": lambda row: str(row.slots),
    "layer inputs": lambda row: _known(row.layer_inputs),
    "layers kept": lambda row: _known(row.kept_layers),
    "memory": _memory,
    "ring": lambda row: _known(row.traffic.ring, human_bytes),
    "gathers": lambda row: f"{row.weight_gathers:g}",
    "reduce-scatters": lambda row: f"{row.weight_scatters:g}",
    "sent": lambda row: _known(row.traffic.weights, human_bytes),
    "weights": lambda row: _known(row.memory.weights, human_bytes),
    "gradients": lambda row: _known(row.memory.gradients, human_bytes),
}
SCHEDULES = "ticks,cost,bubble,work/useful,saved inputs,memory,ring".split(",")
POLICIES = "a microbatch,cost,saved inputs,layer inputs,layers kept,memory".split(",")
GATHERED = "gathers,reduce-scatters,sent,weights,gradients".split(",")
