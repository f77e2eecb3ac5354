"""Tests of compiled programs that are stored for the next start."""

import json
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.sharding.hlo import order
from meshloom.trainer.program import digest
from meshloom.trainer.program.executables import FOLDER, Executables

# The order of collectives.

HEADER = """HloModule m

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %inner = f32[8] all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[8]) tuple(%i, %inner)
}

"""
WHILE = "  %w = (s32[], f32[8]) while(%start), condition=%cond, body=%body\n"
AFTER = "  %y = f32[8] get-tuple-element(%w), index=1\n"


def program(*lines: str) -> str:
    first = "  %a = f32[8] parameter(0)\n  %start = (s32[], f32[8]) tuple(%c, %a)\n"
    return HEADER + "ENTRY %main () -> f32[8] {\n" + first + "".join(lines) + "}\n"


def reduce(name: str, operand: str) -> str:
    return f"  %{name} = f32[8] all-reduce(%{operand}), to_apply=%add\n"


def test_a_collective_that_needs_the_loop_comes_after_it():
    assert order.unordered(program(WHILE, AFTER, reduce("r", "y"))) is None


def test_a_collective_that_nothing_ties_to_a_loop_has_no_order():
    text = program(reduce("r", "a"), WHILE, AFTER)
    assert order.unordered(text) == ("w", "r")


def test_collectives_of_one_computation_keep_their_order():
    assert order.unordered(program(reduce("r", "a"), reduce("s", "a"))) is None


def test_two_loops_that_do_not_need_each_other_have_no_order():
    other = WHILE.replace("%w", "%v")
    assert order.unordered(program(WHILE, other)) == ("w", "v")


# Stored programs.


@pytest.fixture(scope="module")
def mesh():
    assert jax.device_count() == 8
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


def lower(mesh, factor: float = 2.0):
    """Lowers a sum over a sharded dimension, which needs a collective."""
    sharded, replicated = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    function = jax.jit(lambda x: (factor * x).sum(), out_shardings=replicated)
    return function.lower(jax.ShapeDtypeStruct((64,), jnp.float32, sharding=sharded))


def lower_unordered(mesh):
    """Lowers two loops with collectives that do not depend on each other."""

    def step(carry, _):
        total = jax.lax.psum(carry, "fsdp") / 8
        return jnp.sin(carry + total), None

    def run(x):
        body = lambda x: jax.lax.scan(step, x, length=9)[0]  # noqa: E731
        loop = jax.shard_map(body, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
        return loop(x), loop(x * 3)

    sharding = NamedSharding(mesh, P("fsdp"))
    shape = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=sharding)
    return jax.jit(run).lower(shape)


class Counted:
    """A lowered program that counts how often it is compiled."""

    def __init__(self, lowered):
        self._lowered, self.count = lowered, 0

    def as_text(self) -> str:
        return self._lowered.as_text()

    def compile(self, **options):
        self.count += 1
        return self._lowered.compile(**options)


@pytest.fixture
def kept(tmp_path, mesh):
    """Compiles a program like a start does; returns (compilations, result, lines)."""

    def start(lowered=None, options=None, flags=None):
        lines: list[str] = []
        counted = Counted(lower(mesh) if lowered is None else lowered)
        found = Executables(tmp_path, lines.append, flags=flags).compile(
            "sum", counted, options
        )
        sharding = NamedSharding(mesh, P("fsdp"))
        x = jax.device_put(jnp.arange(64, dtype=jnp.float32), sharding)
        result = float(found(x)) if lowered is None else None
        return counted.count, result, lines

    start.file = tmp_path / FOLDER / "sum-0"
    return start


LOADED = ["Loaded from an earlier attempt: sum"]


def test_the_next_start_loads_what_was_compiled(kept):
    assert kept() == (1, 4032.0, [])
    assert kept() == (0, 4032.0, LOADED)
    assert os.stat(kept.file).st_mode & 0o777 == 0o600


def test_another_program_or_option_is_compiled(kept, mesh):
    kept()
    assert kept(lower(mesh, factor=3.0))[0] == 1
    assert kept()[0] == 1  # only the newest program of a name is stored
    assert kept(options={"xla_backend_optimization_level": 1})[0] == 1
    assert kept()[0] == 1
    assert kept(flags={"XLA_FLAGS": "--xla_other=1"})[0] == 1


@pytest.mark.parametrize(
    "damage, reason",
    [
        (
            lambda file: file.write_bytes(file.read_bytes()[:-9]),
            "digest does not match",
        ),
        (lambda file: file.write_bytes(b"\x00\x01"), "cannot be used"),
        (lambda file: file.chmod(0o666), "other users may have written it"),
    ],
)
def test_an_untrusted_file_is_reported_and_replaced(kept, damage, reason):
    kept()
    damage(kept.file)
    count, result, lines = kept()
    assert (count, result) == (1, 4032.0)
    assert len(lines) == 1 and reason in lines[0] and "compiled again" in lines[0]
    assert kept() == (0, 4032.0, LOADED)


def test_a_program_without_an_order_is_never_loaded(kept, mesh):
    first, second = (kept(lower_unordered(mesh)) for _ in range(2))
    assert first == second
    count, _, (line,) = first
    assert count == 1
    assert line.startswith("The sum is compiled at every start: in a loaded program")
    assert json.loads(kept.file.read_bytes().partition(b"\n")[0])["reason"]


def test_digests_may_be_compiled_in_advance(mesh, tmp_path):
    sharding = NamedSharding(mesh, P("fsdp"))
    tree = {"a": jax.device_put(jnp.arange(64.0), sharding), "b": jnp.int32(7)}
    expected = digest.tree_digests(tree)
    asked = []
    digest.prepare(tree, lambda lowered: asked.append(lowered) or lowered.compile())
    assert len(asked) == 1
    assert digest.tree_digests(tree) == expected
