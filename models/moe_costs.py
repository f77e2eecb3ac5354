"""What a step of a transformer with experts multiplies, keeps and sends.

A layer is the mean of all layers: where some are dense, products have shares. Sizes of
what experts receive are those of their buffers (models/experts.py).

Shape letters: B batch, L length, D width, K experts of a token, E experts, F hidden
width of an expert.
"""

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING

from .costs import Array, Costs, Product, Working
from .experts import RAGGED_PLATFORMS
from .transformer_costs import POSITIONS, STACK

if TYPE_CHECKING:
    from .moe import Config

DENSE = ("gate", "up", "down")


def costs(
    config: "Config", dense: Costs, rows: int, length: int, platform: str
) -> Costs:
    """Returns the costs of a microbatch of `rows` examples.

    Args:
      dense: those of the model with an MLP in place of the experts.
    """
    c, found = config, dense
    share = c.num_moe_layers / c.num_layers
    where = STACK if c.moe_every == 1 else f"{STACK}last/"
    products = [p for p in found.products if p.name not in DENSE]
    mlp = [p for p in found.products if p.name in DENSE]
    if share < 1:
        products += [replace(p, share=1 - share) for p in mlp]
    routed = _experts(c, rows, length, f"{where}mlp/", mlp, share)
    arrays = _Arrays(c, rows, length, padded=platform not in RAGGED_PLATFORMS)
    again = {p.name for p in routed if not p.name.startswith("shared")}
    if c.remat == "full":
        again |= {"shared gate", "shared up"}
    is_kept = c.remat == "none"
    runs = 4 if is_kept else 6  # there and back: forward, recomputed, backward
    return replace(
        found,
        products=(*products, *routed),
        recomputed=found.recomputed if is_kept else found.recomputed | again,
        kept=(*_kept(found, c), *((arrays.received, arrays.hidden) if is_kept else ())),
        working=(
            *(phase for phase in found.working if phase.name != "mlp"),
            Working(
                "experts",
                (
                    replace(arrays.received, count=2),
                    arrays.hidden,
                    replace(arrays.hidden, name="gradients of experts' hidden"),
                ),
            ),
        ),
        exchanged=(replace(arrays.sent, count=runs),),
        exchanged_along=("experts", c.num_experts),
        exchanged_share=share,
    )


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """Rows of tokens for their experts.

    Attributes:
      padded: whether as many rows travel as there could be.
    """

    config: "Config"
    B: int
    L: int
    padded: bool

    @property
    def sent(self) -> Array:
        received = self.received
        return received if self.padded else replace(received, room=None)

    @property
    def received(self) -> Array:
        return self._make("rows of experts", self.config.d_model, None)

    @property
    def hidden(self) -> Array:
        count = 3 if self.config.mlp == "swiglu" else 2
        made = self._make("experts' hidden", self.config.expert_width, "mlp")
        return replace(made, count=count)

    def _make(self, name: str, width: int, axis: str | None) -> Array:
        c, size = self.config, 2 if self.config.compute_dtype == "bfloat16" else 4
        if c.capacity_factor is not None:
            shape = (self.B, c.num_experts * c.capacity(self.L), width)
            return Array(name, shape, ("batch", None, axis), size)
        each, experts = c.experts_per_token, c.num_experts
        return Array(
            name,
            (self.B, self.L, each, width),
            (*POSITIONS, None, axis),
            size,
            room=("experts", experts, experts / each),
        )


def _experts(
    c: "Config", B: int, L: int, path: str, dense: list[Product], share: float
) -> list[Product]:
    """Returns the products of a layer of experts: router, shared ones, routed ones."""
    D, E, K = c.d_model, c.num_experts, c.experts_per_token
    router = Product(
        "router", (B, L, D, E), (*POSITIONS, "embed", None), f"{path}router"
    )
    found = [replace(router, share=share)]
    width = c.num_shared_experts * c.expert_width
    for product in dense:
        name = product.name
        sizes = (c.expert_width, D) if name == "down" else (D, c.expert_width)
        if width:
            wide = (width, D) if name == "down" else (D, width)
            found.append(
                replace(
                    product,
                    name=f"shared {name}",
                    shape=(B, L, *wide),
                    weight=f"{path}shared/{name}",
                    share=share,
                    summed="",  # one sum with those of the routed experts
                    spread="",
                )
            )
        axes = product.axes[2:]
        if c.capacity_factor is None:
            shape, names = (B, L, K, *sizes), (*POSITIONS, None, *axes)
        else:
            shape = (B, E * c.capacity(L), *sizes)
            names = ("batch", None, *axes)
        weight = f"{path}{name}"
        found.append(
            replace(
                product,
                name=f"expert {name}",
                shape=shape,
                axes=names,
                weight=weight,
                share=share,
            )
        )
    return found


def _kept(found: Costs, c: "Config") -> tuple[Array, ...]:
    """Returns what attention keeps; of hidden layers, those of shared experts."""
    kept = []
    for array in found.kept:
        if not array.name.startswith("hidden"):
            kept.append(array)
        elif c.num_shared_experts:
            width = c.num_shared_experts * c.expert_width
            kept.append(replace(array, shape=(*array.shape[:-1], width)))
    return tuple(kept)
