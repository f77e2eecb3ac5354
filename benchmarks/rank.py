"""Checks that the closed form ranks layouts as the compiled programs do.

    python benchmarks/rank.py [--programs FOLDER] [--suites "7b v5p-128"]

Each suite is one model, target and batch on several meshes. Each case is compiled
(libtpu; a minute or two on two cores), its time is modelled from its HLO text, and
compared with the closed form. --programs keeps the texts and reuses existing ones, so
that a second run needs no libtpu.
"""

import argparse
import tempfile
from pathlib import Path

from plan import Case, micro

from meshloom.trainer.plan.compile.compiled import compile_step
from meshloom.trainer.plan.compile.program import model_program

SUITES = {
    "1b v5e:4x4": [
        Case("1b", "v5e:4x4", mesh, "save-named", 32, settings)
        for mesh, settings in (
            ("fsdp=16", ()),
            ("fsdp=8,tensor=2", ()),
            ("fsdp=4,tensor=4", ()),
            ("fsdp=2,tensor=8", ()),
            ("data=4,fsdp=4", ()),
            ("data=2,fsdp=4,tensor=2", ()),
            ("pipe=2,fsdp=8", micro(4)),
            ("pipe=4,fsdp=4", micro(8)),
            ("pipe=2,fsdp=4,tensor=2", micro(8)),
        )
    ]
    + [Case("1b", "v5e:4x4", "fsdp=16", "full", 32)],
    "7b v5p-128": [
        Case("7b", "v5p-128", "fsdp=64", "save-named", 128),
        Case("7b", "v5p-128", "fsdp=64", "save-dots", 128),
        Case("7b", "v5p-128", "fsdp=64", "full", 128),
        Case("7b", "v5p-128", "fsdp=16,tensor=4", "full", 128),
        Case("7b", "v5p-128", "pipe=4,fsdp=16", "full", 128, micro(8)),
    ],
}


def times(case: Case, programs: Path) -> tuple[float, float]:
    """Seconds of a step: modelled from the program, and by the closed form."""
    found = case.forecast()
    text = programs / f"{str(case).replace(' ', '_')}.hlo"
    if not text.exists():
        compile_step(found, keep=text)
    sizes, dcn = found.case.sizes, found.case.spec.dcn
    program = model_program(text.read_text(), found.target, sizes, dcn=dcn)
    return program.seconds, found.roofline.step


def table(rows: dict[str, tuple[float, float]]) -> str:
    """Formats both times of each case, with the rank by each."""
    lines = ["| case | program, ms | closed form, ms | ratio | rank | closed form's |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    closed = sorted(seconds for _, seconds in rows.values())
    ordered = sorted(rows.items(), key=lambda row: row[1][0])
    for rank, (name, (program, form)) in enumerate(ordered, start=1):
        lines.append(
            f"| {name} | {1000 * program:.0f} | {1000 * form:.0f} | "
            f"{form / program:.3f} | {rank} | {closed.index(form) + 1} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=Path, help="the folder of the HLO texts")
    parser.add_argument("--suites", nargs="+", choices=SUITES, help="which to run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = args.programs or Path(folder)
        programs.mkdir(parents=True, exist_ok=True)
        for name in args.suites or SUITES:
            print(table({str(case): times(case, programs) for case in SUITES[name]}))


if __name__ == "__main__":
    main()
