"""How often the computations of HLO programs run."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshloom.sharding import hlo

LOOP = """HloModule loop, num_partitions=2

%body (b: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {
  %b = (s32[], f32[4]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[4]{0} get-tuple-element(%b), index=1
  %n = s32[] get-tuple-element(%b), index=2
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  %y = f32[4]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %r = (s32[], f32[4]{0}, s32[]) tuple(%next, %y, %n)
}

%compare (p: s32[], q: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %c = pred[] compare(%p, %q), direction=DIRECTION
}

%condition (d: (s32[], f32[4], s32[])) -> pred[] {
  %d = (s32[], f32[4]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%d), index=0
  %m = s32[] get-tuple-element(%d), index=2
  ROOT %f = pred[] fusion(ORDER), kind=kLoop, calls=%compare
}

ENTRY %main (x0: f32[4]) -> f32[4] {
  %x0 = f32[4]{0} parameter(0)
  %start = s32[] constant(START)
  %copy = s32[] copy(%start)
  %bound = s32[] constant(BOUND)
  %init = (s32[], f32[4]{0}, s32[]) tuple(%copy, %x0, %bound)
  %w = (s32[], f32[4]{0}, s32[]) while(%init), condition=%condition, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%w), index=1
}
"""


def loop_text(start, step, direction, bound, order="%j, %m") -> str:
    text = LOOP.replace("START", str(start)).replace("STEP", str(step))
    text = text.replace("BOUND", str(bound)).replace("DIRECTION", direction)
    return text.replace("ORDER", order)


@pytest.mark.parametrize(
    ("start", "step", "direction", "bound", "trips"),
    [
        (0, 1, "LT", 7, 7),
        (2, 3, "LT", 9, 3),
        (2, 3, "LT", 8, 2),
        (0, 2, "LE", 7, 4),
        (0, 2, "LE", 8, 5),
        (6, -1, "GE", 0, 7),
        (9, -4, "GT", 1, 2),
        (0, 5, "NE", 20, 4),
        (9, 1, "LT", 3, 0),
    ],
)
def test_trip_counts_follow_from_start_step_and_bound(
    start, step, direction, bound, trips
):
    times, unknown = hlo.executions(hlo.parse(loop_text(start, step, direction, bound)))
    assert not unknown
    assert (times["body"], times["condition"]) == (trips, trips + 1)


def test_a_comparison_may_have_the_bound_first():
    text = loop_text(0, 1, "GT", 7, order="%m, %j")
    assert hlo.executions(hlo.parse(text))[0]["body"] == 7


def test_trip_counts_equal_those_the_compiler_annotates():
    def forward(w, x):
        def outer(x, _):
            return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], None

        return lax.scan(outer, x, None, length=3)[0]

    w, x = jnp.zeros((5, 8, 8)), jnp.zeros((4, 8))
    text = jax.jit(jax.grad(lambda w, x: jnp.sum(forward(w, x)))).lower(w, x)
    text = text.compile().as_text()
    assert text.count("known_trip_count") == 4
    noted, _ = hlo.executions(hlo.parse(text))
    derived, unknown = hlo.executions(hlo.parse(text.replace("known_trip_count", "_")))
    assert derived == noted and not unknown
    assert hlo.flops(text) == 3 * 15 * 2 * 4 * 8 * 8


def test_the_compilers_annotation_is_used_if_no_count_can_be_derived():
    note = 'body=%body, backend_config={"known_trip_count":{"n":"6"}}'
    text = loop_text(0, 1, "EQ", 7).replace("body=%body", note)
    assert hlo.executions(hlo.parse(text))[0]["body"] == 6


def test_a_computation_called_twice_counts_twice():
    text = loop_text(0, 1, "LT", 7)
    entry = text.index("ENTRY")
    twice = """
ENTRY %top (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %once = f32[4]{0} call(%a), to_apply=%main
  ROOT %again = f32[4]{0} call(%once), to_apply=%main
}
"""
    text = text[:entry] + text[entry:].removeprefix("ENTRY ") + twice
    assert hlo.executions(hlo.parse(text))[0]["body"] == 14
    # A computation that nothing calls does not run, and its loop may be unknown.
    unused = text.replace("to_apply=%main", "to_apply=%sum").replace("LT", "EQ")
    unused = unused.replace(
        "%body (b",
        "%sum (s: f32[4]) -> f32[4] {\n  ROOT %s = f32[4] parameter(0)\n}\n\n%body (b",
    )
    times, unknown = hlo.executions(hlo.parse(unused))
    assert times["sum"] == 2 and times["body"] == 0 and not unknown


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        (loop_text(0, -1, "LT", 7), ""),  # never ends
        (loop_text(0, 3, "NE", 7), ""),
        (loop_text(0, 1, "EQ", 7), ""),
        (loop_text(0, 1, "LT", 7), "add(%i, %step)"),  # the step is not a constant
    ],
)
def test_trip_counts_are_never_guessed(text, replaced):
    if replaced:
        text = text.replace(replaced, "multiply(%i, %step)")
    times, unknown = hlo.executions(hlo.parse(text))
    assert unknown.keys() == {"body", "condition", "compare"}
    assert "while" not in times and "w in main" in unknown["body"]
    assert hlo.executions(hlo.parse(text), 3)[0]["body"] == 3
