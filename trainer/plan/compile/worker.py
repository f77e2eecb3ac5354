"""Compiles one train step for devices that are not here; compiled.py starts it.

python -m meshloom.trainer.plan.compile.worker JOB.pickle DUMP
"""

import dataclasses
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from ....sharding import audit, hlo
from ...run.prepare import prepare
from ..choosing import choose_here
from ..traffic import sum_by

# Attention as one kernel: cuDNN's, or one written for TPUs.
ATTENTION_KERNELS = ('"__cudnn$fmha', '"tpu_custom_call"')


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Data of the right shapes, so that compiling reads none."""

    length: int
    separate_documents: bool = False

    def open(self, split: str) -> "StandIn":
        return self

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        names = ["inputs", "targets"]
        names += ["segments", "positions"] if self.separate_documents else []
        whole = {name: np.zeros(self.length, np.int32) for name in names}
        return whole | {"weights": np.ones(self.length, np.float32)}

    def describe(self) -> dict[str, Any]:
        return {"length": self.length}


def main(job: Path, dump: Path) -> None:
    # The devices are given; without this jax would look for local TPUs.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    facts = pickle.loads(job.read_bytes())
    data = facts["config"].data
    config = dataclasses.replace(
        facts["config"],
        data=StandIn(data.length, getattr(data, "separate_documents", False)),
        eval_batches=0,
        sample_prompt=None,
    )
    found = topologies.get_topology_desc(**facts["topology"])
    prepared = prepare(config, found.devices, choose=choose_here)
    begin = time.perf_counter()
    compiled = prepared.compile()
    seconds = time.perf_counter() - begin
    # libtpu writes ".after_optimizations", XLA for GPUs "_gpu_after_optimizations".
    (program,) = dump.glob("*jit_train_step*after_optimizations.txt")
    text = program.read_text()
    job.with_suffix(".hlo").write_text(text)
    # GPUs run one program; TPU slices have one each.
    dcn = config.mesh.dcn if "num_slices" in facts["topology"] else None
    memory = compiled.memory_analysis()
    collectives = audit(text, prepared.mesh, dcn=dcn)
    totals = collectives.by_kind_and_axes()
    sources = sum_by(
        ((one.kind, one.axes, one.source or one.op_name), one.bytes)
        for one in collectives.collectives
    )
    result = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "flops": hlo.flops(text),
        "seconds": seconds,
        "fused": any(kernel in text for kernel in ATTENTION_KERNELS),
        "collectives": [(*key, *count) for key, count in totals.items()],
        "sources": [(*key, count) for key, count in sources.items()],
    }
    job.with_suffix(".json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
