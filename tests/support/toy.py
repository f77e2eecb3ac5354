"""A user's own module of config classes, for the tests of config files."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol


class Rate(Protocol):
    def at(self, step: int) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    value: float = 0.5

    def at(self, step):
        return self.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    eps: float = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    num_layers: int = 2
    d_model: int = 64
    num_heads: int = 4
    act: Literal["gelu", "swiglu"] = "gelu"
    norm: Norm = Norm()
    head_norm: Norm | None = None

    def __post_init__(self):
        if self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads} does not divide d_model {self.d_model};"
                "\n give another num_heads"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    b1: float = 0.9
    rate: Rate = Constant()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion:
    b1: float = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    path: str
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    data: int = 1
    fsdp: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
    every: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    model: Model
    batch_size: int
    optimizer: Any = None
    data: Text | None = None
    eval_data: Text | None = None
    mesh: Mesh = Mesh(fsdp=3)
    hooks: tuple[Hook, ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    name: str = "run"
    clip: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grows:
    size: int = 1

    def __post_init__(self):
        object.__setattr__(self, "size", self.size + 1)


def small(layers: int = 1) -> Model:
    return Model(num_layers=layers)


def wrong() -> Model:
    return Model(num_layers="x")
