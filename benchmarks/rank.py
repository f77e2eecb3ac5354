"""Does the closed form order plans as the programs that the compiler makes of them?

    python benchmarks/rank.py [--programs FOLDER]

One model, target and batch on several meshes: each is compiled (libtpu; a minute or
two each on two cores), its time is modelled from its text, and the closed form stands
beside it. With --programs, texts are kept there, and those that are there are not
compiled again: such a run needs no libtpu.
"""

import argparse
import tempfile
from pathlib import Path

from plan import Case, micro

from meshloom.trainer.plan.compiled import compile_step
from meshloom.trainer.plan.program import model_program

MODEL, TARGET, BATCH = "1b", "v5e:4x4", 32
MESHES = [
    ("fsdp=16", "save-named", ()),
    ("fsdp=16", "full", ()),
    ("fsdp=8,tensor=2", "save-named", ()),
    ("fsdp=4,tensor=4", "save-named", ()),
    ("fsdp=2,tensor=8", "save-named", ()),
    ("data=4,fsdp=4", "save-named", ()),
    ("data=2,fsdp=4,tensor=2", "save-named", ()),
    ("pipe=2,fsdp=8", "save-named", micro(4)),
    ("pipe=4,fsdp=4", "save-named", micro(8)),
    ("pipe=2,fsdp=4,tensor=2", "save-named", micro(8)),
]


def times(case: Case, programs: Path) -> tuple[float, float]:
    """Seconds of a step: modelled from the program, and by the closed form."""
    found = case.plan()
    text = programs / f"{str(case).replace(' ', '_')}.hlo"
    if not text.exists():
        compile_step(found, keep=text)
    sizes, dcn = found.case.sizes, found.case.spec.dcn
    program = model_program(text.read_text(), found.target, sizes, dcn=dcn)
    return program.seconds, found.roofline.step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=Path, help="a folder for programs' texts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = args.programs or Path(folder)
        programs.mkdir(parents=True, exist_ok=True)
        rows = {}
        for mesh, remat, settings in MESHES:
            case = Case(MODEL, TARGET, mesh, remat, BATCH, settings)
            rows[str(case)] = times(case, programs)
    closed = sorted(seconds for _, seconds in rows.values())
    print("| plan | program, ms | closed form, ms | ratio | place | closed form's |")
    print("| --- | --- | --- | --- | --- | --- |")
    ordered = sorted(rows.items(), key=lambda row: row[1][0])
    for place, (name, (program, form)) in enumerate(ordered, start=1):
        print(
            f"| {name} | {1000 * program:.0f} | {1000 * form:.0f} | "
            f"{form / program:.3f} | {place} | {closed.index(form) + 1} |"
        )


if __name__ == "__main__":
    main()
