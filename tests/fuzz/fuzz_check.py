"""Runs one case and compares it with the same model on one device.

A state that another layout takes over must be the same bits there.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from fuzz_cases import Case, Layout
from fuzz_compare import (
    NUM_NUDGES,
    Taken,
    close,
    close_states,
    nudge,
    same_bits,
    tolerance,
)
from fuzz_models import NUM_STEPS, OPTIMIZERS, RATES, batches, make_model, make_plain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.sharding import MeshSpec
from meshloom.sharding.placing import place_global
from meshloom.trainer.program.build import Program, build
from meshloom.trainer.program.pipelining import Pipelining
from meshloom.trainer.program.rules import make_rules
from meshloom.trainer.program.state import State

SEED = 1


def make_program(case: Case, layout: Layout, model: Any, devices: Any) -> Program:
    return build(
        model,
        OPTIMIZERS[case.optimizer],
        MeshSpec.parse(layout.mesh).make(devices[: layout.num_devices]),
        make_rules(layout.plan, layout.rules),
        batches(case, model, 0, 1)[0],
        learning_rate=RATES[case.rate].make(NUM_STEPS),
        num_microbatches=layout.num_microbatches,
        pipeline=Pipelining(
            schedule=layout.schedule,
            num_chunks=layout.num_chunks,
            gather=layout.gather,
        ),
        max_grad_norm=case.max_grad_norm,
        skip_grad_norm=case.skip_grad_norm,
        donate=case.donate,
    )


def build_case(case: Case) -> list[Program]:
    """The Program of each layout; raises ValueError for what does not fit."""
    model = make_model(case)
    return [make_program(case, x, model, jax.devices()) for x in case.layouts]


def check(case: Case, programs: list[Program]) -> None:
    """Raises AssertionError where a Program does not do what one device does."""
    one, many = reference(case), programs[0]
    state = one.begin()
    begin = fetch(many, many.init(jax.random.key(SEED)))
    same_bits(begin, state, "the state of step 0")
    each = NUM_STEPS // len(programs)
    for number, (layout, program) in enumerate(
        zip(case.layouts, programs, strict=True)
    ):
        steps = range(number * each, (number + 1) * each)
        state = compare(case, layout, one, program, state, steps)


def compare(
    case: Case,
    layout: Layout,
    one: "Reference",
    many: Program,
    first: State,
    steps: range,
) -> State:
    """Trains from a state on one device and many; returns the last state of many."""
    limits = tolerance(case)
    state = place(many, first)
    same_bits(fetch(many, state), first, "the state that was taken over")
    check_sharded(case.family, layout, many, state)
    model, axes = many.model, many.batch_shardings
    given = batches(case, model, steps.start, steps.stop)
    if case.evaluate:
        batch = jax.tree.map(place_global, given[0], axes)
        sums = jax.device_get(many.evaluate(state, batch))
        close(sums, one.evaluate(first, given[0]), limits.loss, "evaluate")
    for number, host in zip(steps, given, strict=True):
        wanted = one.step(first, host)
        batch = jax.tree.map(place_global, host, axes)
        parts = None
        if case.parts:
            kept = jax.tree.map(lambda x: x.copy(), state)
            found = many.gradients(kept, batch)
            parts = fetch(many, many.apply(kept, found)[0])
        state, metrics = many.step(state, batch)
        last = fetch(many, state)
        if parts is not None:
            same_bits(last, parts, "gradients and apply, not step")
        what = f"step {number} on {layout.mesh}"
        close(jax.device_get(metrics), wanted.metrics, limits.loss, what)
        close_states(last, first, wanted, limits, what)
        first = last  # so that rounding does not add up
    return first


class Reference:
    """The model on one device, at once and without a pipeline."""

    def __init__(self, case: Case):
        self._case = case
        model = make_plain(make_model(case))
        case = dataclasses.replace(case, donate=False)
        layout = Layout(rules={"classes": None})
        self._program = make_program(case, layout, model, jax.local_devices())

    def begin(self) -> State:
        return jax.device_get(self._program.init(jax.random.key(SEED)))

    def step(self, state: State, batch: dict) -> Taken:
        found = self._program.gradients(state, batch)
        new, metrics = self._program.apply(state, found)
        nudged = functools.partial(self._nudged, state, batch)
        return Taken(*jax.device_get((found.params, new, metrics)), nudged)

    def _nudged(self, state: State, batch: dict) -> list[State]:
        states = []
        for seed in range(NUM_NUDGES):
            params = nudge(state.params, seed, self._case)
            found = self._program.gradients(state._replace(params=params), batch)
            states.append(jax.device_get(self._program.apply(state, found)[0]))
        return states

    def evaluate(self, state: State, batch: dict) -> dict[str, Any]:
        return jax.device_get(self._program.evaluate(state, batch))


def reference(case: Case) -> Reference:
    """The last one again where a case differs in layout only, as while it shrinks."""
    layout = {name: getattr(Case(), name) for name in LAYOUT}
    return _reference(dataclasses.replace(case, **layout).to_json())


# What the reference does not depend on.
LAYOUT = ("layout", "resume", "parts", "evaluate", "donate", "spoiled", "processes")


@functools.lru_cache(maxsize=1)
def _reference(text: str) -> Reference:
    return Reference(Case.from_json(text))


def fetch(program: Program, state: State) -> State:
    """The state on this host, layers in their own order."""
    state = program.layout.canonical(state, program.mesh)
    if not program.mesh.is_multi_process:
        return jax.device_get(state)
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(program.mesh, P()))
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), gather(state))


def place(program: Program, state: State) -> State:
    """A state of the host, sharded and with layers in the order of the program."""
    state = jax.tree.map(place_global, state, program.shardings)
    return program.layout.arranged(state, program.mesh)


# A matrix of each family, and which mesh axes shard it under which plans.
MATRICES = {
    "transformer": lambda params: params["blocks"]["mlp"]["down"],
    "classifier": lambda params: params["trunk"]["up"],
    "noisy": lambda params: params["up"],
}
SHARDED_BY = {
    "tensor": {"tensor", "tensor2d"},
    "fsdp": {"fsdp", "tensor2d"},
    "pipe": {"pipeline"},
}


def check_sharded(family: str, layout: Layout, program: Program, state: State) -> None:
    """Proves that arrays are in as many pieces as mesh and plan say, and no larger."""
    for x, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(program.shardings), strict=True
    ):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), x.sharding
    if layout.rules:  # which say something else
        return
    plans = set(layout.plan.split("+"))
    ways = math.prod(
        layout.sizes.get(axis, 1) for axis, by in SHARDED_BY.items() if by & plans
    )
    matrix = MATRICES[family](state.params)
    indices = matrix.sharding.devices_indices_map(matrix.shape).values()
    pieces = len({str(index) for index in indices})
    assert pieces == ways, f"{pieces} pieces of a weight, not {ways}"
    assert matrix.addressable_shards[0].data.size * ways == matrix.size
