"""Does the closed form order plans as the programs that the compiler makes of them?

    python benchmarks/rank.py [--programs FOLDER] [--plans "7b v5p-128"]

One model, target and batch on several meshes: each is compiled (libtpu; a minute or
two each on two cores), its time is modelled from its text, and the closed form stands
beside it. With --programs, texts are kept there, and those that are there are not
compiled again: such a run needs no libtpu.
"""

import argparse
import tempfile
from pathlib import Path

from plan import Case, micro

from meshloom.trainer.plan.compile.compiled import compile_step
from meshloom.trainer.plan.compile.program import model_program

PLANS = {
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
    lines = ["| plan | program, ms | closed form, ms | ratio | place | closed form's |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    closed = sorted(seconds for _, seconds in rows.values())
    ordered = sorted(rows.items(), key=lambda row: row[1][0])
    for place, (name, (program, form)) in enumerate(ordered, start=1):
        lines.append(
            f"| {name} | {1000 * program:.0f} | {1000 * form:.0f} | "
            f"{form / program:.3f} | {place} | {closed.index(form) + 1} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=Path, help="a folder for programs' texts")
    parser.add_argument("--plans", nargs="+", choices=PLANS, help="which to compare")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = args.programs or Path(folder)
        programs.mkdir(parents=True, exist_ok=True)
        for name in args.plans or PLANS:
            print(table({str(case): times(case, programs) for case in PLANS[name]}))


if __name__ == "__main__":
    main()
