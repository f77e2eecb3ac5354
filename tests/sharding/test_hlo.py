"""Parsing HLO text, of programs compiled here and by other backends."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from meshloom.sharding import hlo, rules
from meshloom.sharding.audit import audit
from meshloom.sharding.hlo import text as hlo_text


def make_mesh(**sizes: int) -> Mesh:
    shape = tuple(sizes.values())
    auto = (AxisType.Auto,) * len(sizes)
    return Mesh(np.array(jax.devices()).reshape(shape), tuple(sizes), axis_types=auto)


def instruction(rest: str, opcode: str = "all-reduce") -> hlo_text.Instruction:
    return hlo_text.Instruction("i", opcode, "f32[4]{0}", rest)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,3,1,2}}", ((0, 3, 1, 2),)),
        ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(2,1,0)", ((0, 4), (2, 6), (1, 5), (3, 7))),
        ("mesh['axis_0'=2,'axis_1'=3] {'axis_1'}", ((0, 1, 2), (3, 4, 5))),
        ("mesh['axis_0'=2,'axis_1'=3] {'axis_0'}", ((0, 3), (1, 4), (2, 5))),
        ("mesh[a=2,b=2] {a,b}", ((0, 1, 2, 3),)),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh[a=2,b=2], device_ids=(3,1,2,0) {b}", ((3, 1), (2, 0))),
        ("mesh[a=2,b=4], device_ids=([4,2]T(1,0)) {b}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("@mesh<a=2,b=2>(devices=[2,2]<=[2,2]T(1,0)) {b}", ((0, 2), (1, 3))),
    ],
)
def test_groups_are_read_in_every_format(text, groups):
    rest = f"%x), channel_id=1, replica_groups={text}, use_global_device_ids=true"
    assert hlo.replica_groups(instruction(rest), 4) == groups


def test_groups_in_an_unknown_format_are_an_error():
    with pytest.raises(ValueError, match="missing or in an unknown format"):
        hlo.replica_groups(instruction("%x), replica_groups=all, dimensions={0}"), 4)


def test_source_target_pairs_are_read():
    rest = "%x), channel_id=2, source_target_pairs={{0,4},{4,12}}, metadata={op_name=0}"
    pairs = hlo.source_target_pairs(instruction(rest, "collective-permute"))
    assert pairs == ((0, 4), (4, 12))


def test_operands_may_have_types_comments_and_layouts():
    rest = (
        "(f32[2]{0:T(8,128)}, /*index=1*/s32[]) %t.1, bf16[4,2]{1,0:T(8,128)(2,1)S(1)} "
        "%b, /*index=2*/%c), dimensions={0}"
    )
    assert instruction(rest).operands() == ["t.1", "b", "c"]
    assert instruction("), custom_call_target=").operands() == []


def test_bytes_depend_on_the_element_type():
    shape = "(f32[2,3]{1,0}, bf16[4], (pred[5], s4[3]), f8e4m3fn[7], token[], f64[])"
    arrays = hlo_text.Instruction("i", "tuple", shape, "").arrays()
    assert [a.num_bytes for a in arrays] == [24, 8, 5, 2, 7, 0, 8]


def layers_text(num_layers: int) -> str:
    def forward(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    w = jax.ShapeDtypeStruct((num_layers, 32, 32), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    return jax.jit(forward).lower(w, x).compile().as_text()


@pytest.mark.parametrize("num_layers", [1, 4, 32])
def test_flops_of_scanned_layers_grow_with_their_number(num_layers):
    assert hlo.flops(layers_text(num_layers)) == num_layers * 2 * 8 * 32 * 32


def test_flops_of_a_batched_product_and_a_gradient():
    a = jax.ShapeDtypeStruct((3, 16, 8), jnp.float32)
    b = jax.ShapeDtypeStruct((3, 8, 24), jnp.float32)
    one = 2 * 3 * 16 * 8 * 24
    product = jax.jit(jnp.matmul).lower(a, b).compile().as_text()
    assert hlo.flops(product) == one

    def loss(a, b):
        return jnp.sum(jnp.sin(a @ b))

    gradient = jax.jit(jax.grad(loss, (0, 1))).lower(a, b).compile().as_text()
    assert hlo.flops(gradient) == 3 * one


def flops_of(line: str, left: str, right: str) -> float:
    return hlo.flops(
        f"HloModule m\n\nENTRY %e (a: {left}, b: {right}) -> f32[] {{\n"
        f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n  ROOT {line}\n}}\n"
    )


def test_flops_of_convolutions():
    # Eight outputs, three taps, all inside.
    line = (
        "%c = f32[8,5,2] convolution(%a, %b), window={size=3}, dim_labels=0bf_0io->0bf"
    )
    assert flops_of(line, "f32[10,5,4]", "f32[3,4,2]") == 2 * 8 * 3 * 5 * 4 * 2
    # Padded by one at both ends, where one of three taps falls outside.
    line = (
        "%c = f32[10,5,2] convolution(%a, %b), window={size=3 pad=1_1}, "
        "dim_labels=0bf_0io->0bf"
    )
    assert flops_of(line, "f32[10,5,4]", "f32[3,4,2]") == 2 * (30 - 2) * 5 * 4 * 2
    # How XLA for TPU prints a product with a batch of four: each meets only itself.
    line = (
        "%c = f32[4,5,2] convolution(%a, %b), window={size=4 stride=3 pad=0_0 "
        "lhs_dilate=4}, dim_labels=0bf_0io->0bf"
    )
    assert flops_of(line, "f32[4,5,8]", "f32[4,8,2]") == 2 * 4 * 5 * 8 * 2
    line = "%c = f32[5,2] convolution(%a, %b), dim_labels=bf_io->bf"
    assert flops_of(line, "f32[5,4]", "f32[4,2]") == 2 * 5 * 4 * 2


def test_flops_of_a_cublas_call():
    line = (
        "%c = (f32[5,2], s8[64]) custom-call(%a, %b)"
        ', custom_call_target="__cublas$gemm"'
        ', backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}}'
    )
    assert flops_of(line, "f32[4,5]", "f32[4,2]") == 2 * 5 * 4 * 2


ASYNC = """HloModule asynchronous, is_scheduled=true, num_partitions=8

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%wrapped (q: f32[16,4]) -> f32[8,4] {
  %q = f32[16,4]{1,0} parameter(0)
  ROOT %rs = f32[8,4]{1,0} reduce-scatter(%q), channel_id=4, replica_groups=[4,2]<=[8], use_global_device_ids=true, dimensions={0}, to_apply=%sum
}

ENTRY %main (a: f32[16,4], b: bf16[8]) -> f32[16,4] {
  %a = f32[16,4]{1,0} parameter(0)
  %b = bf16[8]{0} parameter(1)
  %ags = ((f32[16,4]{1,0}, bf16[8]{0}), (f32[64,4]{1,0}, bf16[32]{0})) all-gather-start(%a, %b), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(f)/gather" source_file="/src/model.py" source_line=12}
  %agd = (f32[64,4]{1,0}, bf16[32]{0}) all-gather-done(%ags)
  %ars = f32[16,4]{1,0} all-reduce-start(f32[16,4]{1,0} %a), channel_id=2, replica_groups={}, use_global_device_ids=true, to_apply=%sum
  %ard = f32[16,4]{1,0} all-reduce-done(f32[16,4]{1,0} %ars)
  %cps = (f32[16,4]{1,0}, f32[16,4]{1,0}, u32[], u32[]) collective-permute-start(%a), channel_id=3, source_target_pairs={{0,4},{4,0},{1,1}}
  %cpd = f32[16,4]{1,0} collective-permute-done(%cps)
  %rss = ((f32[16,4]{1,0}), f32[8,4]{1,0}, u32[]) async-start(%a), calls=%wrapped
  %rsd = f32[8,4]{1,0} async-done(%rss)
  ROOT %add = f32[16,4]{1,0} add(%ard, %cpd)
}
"""  # noqa: E501


def test_asynchronous_collectives_count_once():
    result = audit(ASYNC, make_mesh(a=2, b=2, c=2))
    a = 16 * 4 * 4
    assert result.by_kind_and_axes() == {
        ("all-gather", ("a", "b")): (1, 4 * (a + 16)),
        ("all-reduce", ("a", "b", "c")): (1, a),
        ("collective-permute", ("a",)): (1, a),
        ("reduce-scatter", ("c",)): (1, a),
    }
    gather = next(c for c in result.collectives if c.kind == "all-gather")
    assert gather.source == "/src/model.py:12"
    assert (gather.dtype, gather.shape) == ("bf16+f32", (4 * (64 + 8),))


def test_a_permute_of_everything_to_itself_moves_nothing():
    pairs = "{{0,4},{4,0},{1,1}}"
    assert pairs in ASYNC
    text = ASYNC.replace(pairs, "{{0,0},{1,1}}")
    result = audit(text, make_mesh(a=2, b=2, c=2))
    assert result.total("collective-permute") == (0, 0)


# XLA for TPU starts a gather in one fusion, carries it through others that multiply,
# and ends it in a last one. It marks a reduce-scatter by the name of its fusion.
TPU = """HloModule tpu, is_scheduled=true, num_partitions=8

%sum (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[]{:T(256)} parameter(0)
  %y = bf16[]{:T(256)} parameter(1)
  ROOT %z = bf16[]{:T(256)} add(%x, %y)
}

%start (p0: bf16[32,8]) -> (bf16[32,8], bf16[32,16], s32[2]) {
  %p0 = bf16[32,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %g0 = bf16[32,16]{1,0:T(8,128)(2,1)} all-gather(%p0), channel_id=6, replica_groups=[4,2]<=[4,2]T(1,0), dimensions={1}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %cc0 = (bf16[32,8]{1,0:T(8,128)(2,1)S(1)}, bf16[32,16]{1,0:T(8,128)(2,1)S(1)}, s32[2]{0:S(4)}) custom-call(%g0), custom_call_target="AsyncCollectiveStart"
}

%done (p2: bf16[32,8], p3: bf16[32,16], p4: s32[2]) -> bf16[32,16] {
  %p2 = bf16[32,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p3 = bf16[32,16]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %p4 = s32[2]{0:S(4)} parameter(2)
  %g2 = bf16[32,16]{1,0:T(8,128)(2,1)} all-gather(%p2), channel_id=6, replica_groups=[4,2]<=[4,2]T(1,0), dimensions={1}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %cc2 = bf16[32,16]{1,0:T(8,128)(2,1)S(1)} custom-call(%p2, %p3, %g2, %p4), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.2.clone.1 (input: bf16[32,16]) -> bf16[32,8] {
  %input = bf16[32,16]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all = bf16[32,16]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=1, replica_groups={{0,2},{4,6},{1,3},{5,7}}, use_global_device_ids=true, to_apply=%sum
  %zero = u32[] constant(0)
  ROOT %cut = bf16[32,8]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all, %zero, %zero), dynamic_slice_sizes={32,8}
}

ENTRY %main (w: bf16[32,8]) -> bf16[32,8] {
  %w = bf16[32,8]{1,0:T(8,128)(2,1)} parameter(0)
  %async-collective-start = (bf16[32,8]{1,0:T(8,128)(2,1)S(1)}, bf16[32,16]{1,0:T(8,128)(2,1)S(1)}, s32[2]{0:S(4)}) fusion(%w), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%start
  %e0 = bf16[32,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%async-collective-start), index=0
  %e1 = bf16[32,16]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%async-collective-start), index=1
  %e2 = s32[2]{0:S(4)} get-tuple-element(%async-collective-start), index=2
  %async-collective-done = bf16[32,16]{1,0:T(8,128)(2,1)S(1)} fusion(%e0, %e1, %e2), kind=kCustom, calls=%done
  ROOT %fusion.55 = bf16[32,8]{1,0:T(8,128)(2,1)S(1)} fusion(%async-collective-done), kind=kCustom, calls=%all-reduce-scatter.2.clone.1, metadata={op_name="jit(f)/dot_general" source_file="m.py" source_line=7}
}
"""  # noqa: E501


def test_fused_gathers_and_scatters_of_xla_for_tpu_are_counted():
    result = audit(TPU, make_mesh(data=2, fsdp=2, tensor=2))
    num_bytes = 32 * 16 * 2
    assert result.by_kind_and_axes() == {
        ("all-gather", ("fsdp",)): (1, num_bytes),
        ("reduce-scatter", ("fsdp",)): (1, num_bytes),
    }
    # It has no source of its own, so the fusion's is used.
    assert result.collectives[-1].source == "m.py:7"


def test_frames_of_this_package_are_skipped():
    own = os.path.join(os.path.dirname(rules.__file__), "rules.py")
    text = f"""HloModule m

FileNames
1 "/home/model.py"
2 "{own}"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=5 end_line=5}}
2 {{file_name_id=2 function_name_id=1 line=9 end_line=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

ENTRY %e (a: f32[]) -> f32[] {{
  ROOT %a = f32[] parameter(0), metadata={{op_name="x" stack_frame_id=2}}
}}
"""
    module = hlo.parse(text)
    (only,) = module.computations["e"].instructions.values()
    assert module.source(only) == "/home/model.py:5"


def test_conditionals_count_every_branch():
    mesh = make_mesh(data=8)
    spec = jax.sharding.PartitionSpec("data")

    @jax.shard_map(mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    def choose(flag, x):
        ring = [(i, (i + 1) % 8) for i in range(8)]
        branches = (lambda x: x + lax.psum(x, "data"), lambda x: -x)
        x = lax.cond(flag[0] > 0, *branches, x)
        return lax.cond(
            flag[0] > 3, lambda x: lax.ppermute(x, "data", ring), jnp.sin, x
        )

    flag, x = jnp.zeros((8,)), jnp.zeros((16,))
    result = audit(jax.jit(choose).lower(flag, x).compile(), mesh)
    assert result.by_kind_and_axes() == {
        ("all-reduce", ("data",)): (1, 8),
        ("collective-permute", ("data",)): (1, 8),
    }


def test_truncated_text_is_an_error():
    with pytest.raises(ValueError, match="which the text does not define"):
        hlo.executions(hlo.parse(TPU.replace("%done (", "%gone (")))
    with pytest.raises(ValueError, match="found a second HloModule"):
        hlo.parse(TPU + ASYNC)
