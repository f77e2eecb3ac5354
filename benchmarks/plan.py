"""Compares the closed form of `meshloom plan` with compilers, case by case.

    python benchmarks/plan.py [--cases gpt2 v5p] [--json FILE] [--list]

Needs the compilers of the cases' targets: `--cases v5e v5p` libtpu, `--cases h100 a100`
XLA for GPUs. Each case is compiled in a process of its own, up to two minutes on two
cores; with --json, cases that the file has are not compiled again.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from meshloom.trainer.config import files as config_files
from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.compile.compiled import SMALL, Compiled, compile_step
from meshloom.trainer.plan.traffic import by_axes
from meshloom.trainer.run.train import Config

# A model of 0.95 billion parameters, from the config of Llama 2.
ONE_B = [
    "model.num_layers=16",
    "model.d_model=2048",
    "model.num_heads=16",
    "model.num_kv_heads=16",
    "model.d_ff=5632",
    "model.max_length=2048",
    "data.length=2048",
]
THREE_B = [
    "model.num_layers=28",
    "model.d_model=3072",
    "model.num_heads=24",
    "model.d_ff=8192",
    "model.max_length=4096",
    "data.length=4096",
]
MODELS = {
    "gpt2": ("gpt2_124m", []),
    "1b": ("llama2_7b", ONE_B),
    "3b": ("llama3_8b", THREE_B),
    "7b": ("llama2_7b", []),
    "8b": ("llama3_8b", []),
}
INTERLEAVED = 'pipeline.schedule="interleaved"'
SEQUENCE = 'plan="data+fsdp+tensor+sequence+pipeline"'
BLOCK = "model.head_block="
# Nothing is left open: a case is the same program whatever the defaults are.
PLAIN = {
    "plan": '"data+fsdp+tensor+pipeline"',
    "num_microbatches": "1",
    "pipeline.schedule": '"1f1b"',
    "pipeline.gather": '"step"',
    "model.head_block": "0",
}


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    target: str
    mesh: str
    remat: str
    batch: int
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = "".join(", interleaved" for s in self.settings if s == INTERLEAVED)
        kind += "".join(", sequence" for s in self.settings if s == SEQUENCE)
        parts = [s.split("=")[1] for s in self.settings if s.startswith("num_micro")]
        micro = f", {parts[0]} microbatches" if parts else ""
        blocks = [s.split("=")[1] for s in self.settings if s.startswith(BLOCK)]
        micro += f", blocks of {blocks[0]}" if blocks else ""
        words = f"{self.model} {self.target} {self.mesh} {self.remat}"
        return f"{words}{kind}{micro}"

    def forecast(self):
        name, settings = MODELS[self.model]
        own = dict(s.split("=", 1) for s in self.settings)
        words = [f"{name}={value}" for name, value in (PLAIN | own).items()]
        words += [*settings, f'model.remat="{self.remat}"']
        config = config_files.load([name], words, root=Config).config
        return forecast(config, self.target, mesh=self.mesh, batch=self.batch)


def micro(num: int, *more: str) -> tuple[str, ...]:
    if INTERLEAVED in more:
        more += ("pipeline.num_chunks=2",)
    return (f"num_microbatches={num}", *more)


V5E, V5P, H100, MANY = "v5e:4x4", "v5p-128", "h100:2x8", "h100:8x8"
CASES = [
    Case("gpt2", V5E, "fsdp=16", "full", 128),
    Case("gpt2", V5E, "fsdp=16", "none", 64),
    Case("gpt2", V5E, "fsdp=4,tensor=4", "save-named", 32),
    Case("gpt2", V5E, "pipe=4,fsdp=4", "full", 128, micro(8)),
    Case("1b", V5E, "fsdp=16", "full", 64),
    Case("1b", V5E, "fsdp=16", "save-named", 32),
    Case("1b", V5E, "fsdp=4,tensor=4", "save-dots", 16),
    Case("1b", V5E, "fsdp=4,tensor=4", "full", 16),
    Case("1b", V5E, "fsdp=8,tensor=2", "none", 8),
    Case("1b", V5E, "pipe=4,fsdp=4", "save-named", 64, micro(16)),
    Case("1b", V5E, "pipe=2,fsdp=4,tensor=2", "full", 64, micro(8, INTERLEAVED)),
    Case("1b", V5E, "data=2,fsdp=4,tensor=2", "save-dots", 32),
    Case("7b", V5P, "fsdp=64", "full", 128),
    Case("7b", V5P, "fsdp=16,tensor=4", "save-named", 32),
    Case("7b", V5P, "fsdp=8,tensor=8", "full", 32),
    Case("7b", V5P, "pipe=4,fsdp=16", "save-named", 256, micro(16)),
    Case("7b", V5P, "pipe=4,fsdp=8,tensor=2", "full", 64, micro(8, INTERLEAVED)),
    Case("8b", V5P, "fsdp=64", "full", 64),
    Case("8b", V5P, "fsdp=64", "save-dots", 64),
    Case("8b", V5P, "fsdp=16,tensor=4", "full", 16),
    Case("8b", V5P, "fsdp=32,tensor=2", "save-named", 32),
    Case("8b", V5P, "pipe=4,fsdp=16", "full", 256, micro(16)),
    Case("7b", V5P, "fsdp=16,tensor=4", "full", 128, (SEQUENCE,)),
    Case("8b", "v5p-64", "fsdp=8,tensor=4", "full", 64, (SEQUENCE,)),
    Case("8b", "v5p-256", "data=2,fsdp=16,tensor=4", "full", 128, (SEQUENCE,)),
    Case("7b", "v5e-256", "fsdp=64,tensor=4", "full", 256, (SEQUENCE,)),
    Case("1b", "v5e-64", "fsdp=16,tensor=4", "full", 128, (SEQUENCE,)),
    Case("3b", "v5e-128", "fsdp=32,tensor=4", "full", 128, (SEQUENCE,)),
    Case("3b", "v5e-64", "fsdp=8,tensor=8", "none", 16, (SEQUENCE,)),
    Case("8b", "v6e-64", "fsdp=16,tensor=4", "save-named", 64, (SEQUENCE,)),
    Case("1b", "v6e-16", "fsdp=8,tensor=2", "save-dots", 64, (SEQUENCE,)),
    Case("gpt2", "2xv5e:4x4", "data=2/2,fsdp=16", "full", 256),
    Case("8b", "2xv5p-128", "data=2/2,fsdp=64", "full", 128),
    Case("gpt2", H100, "fsdp=16", "full", 128),
    Case("gpt2", H100, "fsdp=16", "none", 64),
    Case("gpt2", H100, "fsdp=4,tensor=4", "save-named", 32),
    Case("gpt2", H100, "pipe=4,fsdp=4", "full", 128, micro(8)),
    Case("1b", H100, "fsdp=16", "full", 64),
    Case("1b", H100, "fsdp=16", "full", 128, micro(4)),
    Case("1b", H100, "fsdp=16", "save-named", 32),
    Case("1b", H100, "fsdp=4,tensor=4", "save-dots", 16),
    Case("1b", H100, "fsdp=8,tensor=2", "none", 16),
    Case("1b", H100, "data=2,fsdp=8", "full", 64),
    Case("1b", H100, "pipe=4,fsdp=4", "save-named", 64, micro(16)),
    Case("1b", H100, "pipe=2,fsdp=4,tensor=2", "full", 64, micro(8, INTERLEAVED)),
    Case("1b", "a100:2x8", "fsdp=16", "save-dots", 32),
    Case("7b", MANY, "fsdp=64", "full", 128),
    Case("7b", MANY, "fsdp=64", "save-dots", 64),
    Case("7b", MANY, "fsdp=16,tensor=4", "full", 128),
    Case("7b", MANY, "fsdp=8,tensor=8", "none", 32),
    Case("7b", MANY, "pipe=4,fsdp=8,tensor=2", "save-named", 64, micro(8)),
    Case("8b", MANY, "fsdp=64", "save-named", 64),
    Case("8b", MANY, "fsdp=8,tensor=8", "full", 64),
    Case("8b", MANY, "fsdp=16,tensor=4", "save-named", 32),
    Case("8b", MANY, "pipe=4,fsdp=16", "full", 256, micro(16)),
    # The head in blocks, and at once: --cases "8b v5p-64" "8b a100"
    Case("8b", "v5p-64", "fsdp=32", "full", 256),
    Case("8b", "v5p-64", "fsdp=32", "full", 256, (f"{BLOCK}16384",)),
    Case("8b", "v5p-64", "fsdp=32", "full", 512, (f"{BLOCK}32768",)),
    Case("8b", "a100:2x8", "fsdp=16", "full", 64),
    Case("8b", "a100:2x8", "fsdp=16", "full", 64, (f"{BLOCK}4096",)),
    Case("8b", "a100:2x8", "fsdp=16", "full", 512, micro(4)),
    Case("8b", "a100:2x8", "fsdp=16", "full", 512, (*micro(4), f"{BLOCK}16384")),
]


def figures(case: Case, compiled: Compiled) -> dict:
    """Returns what is compared, predicted and compiled."""
    found = case.forecast()
    moved, predicted = compiled.bytes_by_axes(), by_axes(found.transfers)
    axes = [a for a in {*moved, *predicted} if moved.get(a, 0) >= SMALL]
    return {
        "peak": (found.memory.peak, compiled.peak),
        "reserved": (found.memory.peak, compiled.reserved),
        "flops": (found.flops.executed, compiled.flops),
        "traffic": (sum(predicted.values()), sum(moved.values())),
        "worst axis": max(
            ((predicted.get(a, 0), moved[a]) for a in axes),
            key=lambda both: abs(both[0] / both[1] - 1),
        ),
    }


def table(rows: dict[Case, Compiled]) -> str:
    head = ["case", "batch", "peak GiB: predicted", "compiled", "ratio"]
    head += ["of reserved", "FLOPs ratio", "traffic ratio", "worst axis", "compile"]
    lines = [head, ["---"] * len(head)]
    for case, compiled in rows.items():
        found = figures(case, compiled)
        ratio = {name: a / b for name, (a, b) in found.items()}
        gib = [f"{x / 2**30:.2f}" for x in found["peak"]]
        shown = ("peak", "reserved", "flops", "traffic", "worst axis")
        cells = [f"{ratio[name]:.3f}" for name in shown]
        seconds = f"{compiled.seconds:.0f} s"
        lines.append([str(case), str(case.batch), *gib, *cells, seconds])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([c.ljust(w) for c, w in zip(r, widths, strict=True)] for r in lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", help="words that a case must have one of")
    parser.add_argument("--json", type=Path, help="a file of compiled figures")
    parser.add_argument("--list", action="store_true", help="compile nothing more")
    args = parser.parse_args()
    known = {}
    if args.json and args.json.exists():
        known = json.loads(args.json.read_text())
    rows = {}
    for case in CASES:
        if args.cases and not any(word in str(case) for word in args.cases):
            continue
        if str(case) not in known and not args.list:
            begin = time.perf_counter()
            compiled = compile_step(case.forecast())
            known[str(case)] = dataclasses.asdict(compiled)
            print(f"{case}: {time.perf_counter() - begin:.0f} s", flush=True)
            if args.json:
                args.json.write_text(json.dumps(known))
        if str(case) in known:
            rows[case] = Compiled.from_json(known[str(case)])
    print(table(rows))


if __name__ == "__main__":
    main()
