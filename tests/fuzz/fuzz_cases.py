"""A case of the fuzzer: a model, its data and optimizer, and how they are laid out.

A case is plain data that fits on a command line: what is left out has its default.
"""

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

# The transformer of a case that says nothing else of it.
TRANSFORMER = {
    "vocab_size": 64,
    "pad_vocab_to": 1,
    "num_layers": 1,
    "d_model": 8,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 8,
    "d_ff": 4,
    "norm": "rms",
    "positions": "rotary",
    "mlp": "swiglu",
    "use_bias": False,
    "tied_head": False,
    "logit_softcap": None,
    "z_loss": 0.0,
    "remat": "none",
    "unroll": 1,
    "param_dtype": "float32",
    "compute_dtype": "float32",
}
NUM_DEVICES = 8
AXES = ("replica", "pipe", "data", "fsdp", "expert", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where and how a case trains.

    Attributes:
      rules: rows of a config's own, after those of the plan.
      num_microbatches: None leaves it to the library.
      schedule, num_chunks, gather: of a pipeline.
    """

    mesh: str = "data=1"
    plan: str = "data"
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_microbatches: int | None = 1
    schedule: str = "1f1b"
    num_chunks: int | None = None
    gather: str = "step"

    @property
    def sizes(self) -> dict[str, int]:
        parts = (part.split("=") for part in self.mesh.split(","))
        return {name: int(size) for name, size in parts}

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One product of settings.

    Attributes:
      family: transformer, classifier (a stack of equal blocks that is none of ours) or
        noisy (dropout and running averages; no stack).
      model: fields of the family's config.
      data: ones, some or rows (of the weights, how many are 1), packed (documents with
        segments and positions), or nan (a step that must be skipped).
      optimizer, rate: classes of `optimizers` and `schedules`.
      layout: the first steps; resume: where training goes on from its state.
      parts: whether `gradients` and then `apply` are compared with `step` too.
      evaluate: whether `evaluate` is compared too.
      processes: how many the devices belong to.
      spoiled: what was changed so that the library may refuse the case; empty for a
        case that it must take.
    """

    family: str = "transformer"
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: str = "ones"
    batch_size: int = 8
    length: int = 8
    optimizer: str = "AdamW"
    rate: str = "Constant"
    max_grad_norm: float | None = None
    skip_grad_norm: float | None = None
    layout: Layout = Layout()
    resume: Layout | None = None
    parts: bool = False
    evaluate: bool = False
    donate: bool = True
    processes: int = 1
    spoiled: str = ""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return (self.layout, *([self.resume] if self.resume else []))

    @property
    def kind(self) -> str:
        """What progress is counted by."""
        if self.spoiled:
            return "spoiled"
        if self.processes > 1:
            return "processes"
        pipe = "pipeline" if "pipe" in self.layout.mesh else "no pipeline"
        return f"{pipe}, resumed" if self.resume else pipe

    def to_json(self) -> str:
        return json.dumps(_changed(self))

    @classmethod
    def from_json(cls, text: str) -> "Case":
        fields = json.loads(text)
        for name in ("layout", "resume"):
            if fields.get(name) is not None:
                fields[name] = Layout(**fields[name])
        return cls(**fields)

    @property
    def command(self) -> str:
        """Runs exactly this case again."""
        return f"python tests/fuzz {shlex.quote(self.to_json())}"


def _changed(node: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their default."""
    default = type(node)()
    found = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if value == getattr(default, field.name):
            continue
        if dataclasses.is_dataclass(value):
            value = _changed(value)
        found[field.name] = value
    return found
