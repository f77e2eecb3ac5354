# ruff: noqa: E501
"""Short excerpts of programs compiled by libtpu 0.0.51 and XLA for GPUs.

GATHERS, RING: a step of 0.95 billion parameters for v5e:4x4, fsdp=16. KERNEL: jax's
splash attention for v5e. GPU: a sharded product for H100s. Names, types, layouts and
attributes are the compilers'; metadata and other instructions are left out.
"""

# One gather is synchronous, one is carried by a product. 16 devices.
GATHERS = """\
HloModule jit_train_step, is_scheduled=true, num_partitions=16

%fused_computation.486 (param_0.1691: bf16[1,16,128,128]) -> (bf16[1,16,128,128], bf16[1,16,128,2048], s32[2], u32[]) {
  %param_0.1691 = bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.73 = bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)} all-gather(%param_0.1691), channel_id=58, replica_groups=mesh['axis_0'=16] {'axis_0'}, dimensions={3}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %custom-call.42 = (bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)}, bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)}, s32[2]{0:S(4)}, u32[]{:S(2)}) custom-call(%all-gather.73), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.510 (param_0.1696: bf16[1,16,128,128], param_1.1795: bf16[1,16,128,2048], param_2.1448: s32[2], param_3.1090: u32[], param_9.264: bf16[1,2048,16,3,128], param_10.280: bf16[4,2048,2048]) -> (bf16[4,2048,16,3,128], bf16[1,16,128,128], bf16[1,16,128,2048], bf16[1,16,128,2048], s32[2], /*index=5*/u32[]) {
  %param_10.280 = bf16[4,2048,2048]{1,2,0:T(8,128)(2,1)S(1)} parameter(5)
  %bitcast.1 = bf16[4,2048,2048,1,1]{1,2,4,3,0:T(8,128)(2,1)} bitcast(%param_10.280)
  %param_9.264 = bf16[1,2048,16,3,128]{1,4,3,2,0:T(8,128)(2,1)S(1)} parameter(4)
  %bitcast.2 = bf16[2048,16,3,128,1]{0,3,2,1,4:T(8,128)(2,1)} bitcast(%param_9.264)
  %convolution.115 = bf16[4,2048,16,3,128]{1,4,3,2,0:T(8,128)(2,1)} convolution(%bitcast.1, %bitcast.2), window={size=1x16x3 pad=0_0x15_15x2_2 rhs_reversal=0x1x1}, dim_labels=0bf12_i12o0->0b12f
  %param_0.1696 = bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1795 = bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.75 = bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)} all-gather(%param_0.1696), channel_id=58, replica_groups=mesh['axis_0'=16] {'axis_0'}, dimensions={3}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  %param_2.1448 = s32[2]{0:S(4)} parameter(2)
  %param_3.1090 = u32[]{:S(2)} parameter(3)
  ROOT %tuple.333 = (bf16[4,2048,16,3,128]{1,4,3,2,0:T(8,128)(2,1)}, bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)}, bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)}, bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)}, s32[2]{0:S(4)}, /*index=5*/u32[]{:S(2)}) tuple(%convolution.115, %param_0.1696, %param_1.1795, %all-gather.75, %param_2.1448, /*index=5*/%param_3.1090)
}

%fused_computation.491 (param_0.1717: bf16[1,16,128,128], param_1.1812: bf16[1,16,128,2048], param_2.1462: s32[2], param_3.1103: u32[]) -> bf16[1,16,128,2048] {
  %param_0.1717 = bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1812 = bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.83 = bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)} all-gather(%param_0.1717), channel_id=58, replica_groups=mesh['axis_0'=16] {'axis_0'}, dimensions={3}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  %param_2.1462 = s32[2]{0:S(4)} parameter(2)
  %param_3.1103 = u32[]{:S(2)} parameter(3)
  ROOT %custom-call.44 = bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)} custom-call(%param_0.1717, %param_1.1812, %all-gather.83, %param_2.1462, %param_3.1103), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p.0: bf16[1,128,16,3,128], p.1: bf16[1,16,128,128], p.2: bf16[4,2048,2048]) -> (bf16[4,2048,16,3,128], bf16[1,16,128,2048]) {
  %p.0 = bf16[1,128,16,3,128]{1,4,3,2,0:T(8,128)(2,1)S(1)} parameter(0)
  %p.1 = bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)} parameter(1)
  %p.2 = bf16[4,2048,2048]{1,2,0:T(8,128)(2,1)S(1)} parameter(2)
  %all-gather.152 = bf16[1,2048,16,3,128]{1,4,3,2,0:T(8,128)(2,1)S(1)} all-gather(%p.0), channel_id=57, replica_groups=mesh['axis_0'=16] {'axis_0'}, dimensions={1}, use_global_device_ids=true
  %async-collective-start = (bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)}, bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)}, s32[2]{0:S(4)}, u32[]{:S(2)}) fusion(%p.1), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.486
  %get-tuple-element.2143 = u32[]{:S(2)} get-tuple-element(%async-collective-start), index=3
  %get-tuple-element.2142 = s32[2]{0:S(4)} get-tuple-element(%async-collective-start), index=2
  %get-tuple-element.2141 = bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)} get-tuple-element(%async-collective-start), index=1
  %get-tuple-element.2140 = bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)} get-tuple-element(%async-collective-start), index=0
  %fusion.510 = (bf16[4,2048,16,3,128]{1,4,3,2,0:T(8,128)(2,1)}, bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)}, bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)}, bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)}, s32[2]{0:S(4)}, /*index=5*/u32[]{:S(2)}) fusion(%get-tuple-element.2140, %get-tuple-element.2141, %get-tuple-element.2142, %get-tuple-element.2143, %all-gather.152, /*index=5*/%p.2), kind=kOutput, calls=%async_collective_fusion.510
  %get-tuple-element.2149 = bf16[4,2048,16,3,128]{1,4,3,2,0:T(8,128)(2,1)} get-tuple-element(%fusion.510), index=0
  %get-tuple-element.2155 = u32[]{:S(2)} get-tuple-element(%fusion.510), index=5
  %get-tuple-element.2154 = s32[2]{0:S(4)} get-tuple-element(%fusion.510), index=4
  %get-tuple-element.2152 = bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)} get-tuple-element(%fusion.510), index=2
  %get-tuple-element.2151 = bf16[1,16,128,128]{2,3,1,0:T(8,128)(2,1)} get-tuple-element(%fusion.510), index=1
  %async-collective-done = bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)} fusion(%get-tuple-element.2151, %get-tuple-element.2152, %get-tuple-element.2154, %get-tuple-element.2155), kind=kCustom, calls=%fused_computation.491
  ROOT %tuple.1 = (bf16[4,2048,16,3,128]{1,4,3,2,0:T(8,128)(2,1)}, bf16[1,16,128,2048]{2,3,1,0:T(8,128)(2,1)}) tuple(%get-tuple-element.2149, %async-collective-done)
}
"""

# A product and the reduce-scatter of its sum as a bidirectional ring, on 16 devices.
RING = """\
HloModule jit_train_step, is_scheduled=true, num_partitions=16

%fused_computation.112 (param_0.1651: s32[], param_1.1761: bf16[4,2048,1,2048]) -> bf16[4,2048,2,128,1] {
  %param_1.1761 = bf16[4,2048,1,2048]{3,1,0,2:T(8,128)(2,1)} parameter(1)
  %constant.1605 = bf16[]{:T(256)} constant(-inf)
  %pad.315 = bf16[4,2048,2,2048]{3,1,0,2:T(8,128)(2,1)} pad(%param_1.1761, %constant.1605), padding=0_0x0_0x0_1x0_0
  %constant.1604 = s32[]{:T(128)} constant(0)
  %param_0.1651 = s32[]{:T(128)S(6)} parameter(0)
  %dynamic-slice.302 = bf16[4,2048,2,128]{3,1,0,2:T(8,128)(2,1)} dynamic-slice(%pad.315, %constant.1604, %constant.1604, %constant.1604, %param_0.1651), dynamic_slice_sizes={4,2048,2,128}
  ROOT %bitcast.602 = bf16[4,2048,2,128,1]{3,1,0,2,4:T(8,128)(2,1)} bitcast(%dynamic-slice.302)
}

%fused_computation.116.clone.1 (param_0.1653: s32[], param_1.1762: bf16[4,2048,1,2048], param_3.1079: bf16[4,2048,16,128]) -> bf16[16,128,2,128] {
  %param_3.1079 = bf16[4,2048,16,128]{1,3,0,2:T(8,128)(2,1)S(1)} parameter(2)
  %bitcast.603 = bf16[4,2048,16,128,1]{1,3,0,4,2:T(8,128)(2,1)} bitcast(%param_3.1079)
  %param_0.1653 = s32[]{:T(128)S(6)} parameter(0)
  %param_1.1762 = bf16[4,2048,1,2048]{3,1,0,2:T(8,128)(2,1)} parameter(1)
  %fusion.485 = bf16[4,2048,2,128,1]{3,1,0,2,4:T(8,128)(2,1)} fusion(%param_0.1653, %param_1.1762), kind=kLoop, calls=%fused_computation.112
  %convolution.106 = bf16[16,128,2,128,1]{3,1,4,2,0:T(8,128)(2,1)} convolution(%bitcast.603, %fusion.485), window={size=1x2x4 pad=0_0x1_1x0_0 rhs_reversal=0x1x0}, dim_labels=2f0b1_2i1o0->0b1f2
  ROOT %bitcast.604 = bf16[16,128,2,128]{3,1,2,0:T(8,128)(2,1)S(1)} bitcast(%convolution.106)
}

%fused_computation.325.clone.1 (param_0.1605: f32[16,16,128,128], param_1.1729: s32[], param_2.1401: bf16[16,128,128]) -> f32[16,16,128,128] {
  %param_0.1605 = f32[16,16,128,128]{3,2,1,0:T(8,128)} parameter(0)
  %param_2.1401 = bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)} parameter(2)
  %bitcast.571 = bf16[1,16,128,128]{3,2,1,0:T(8,128)(2,1)} bitcast(%param_2.1401)
  %convert.233 = f32[1,16,128,128]{3,2,1,0:T(8,128)} convert(%bitcast.571)
  %param_1.1729 = s32[]{:T(128)S(6)} parameter(1)
  %constant.356 = s32[]{:T(128)} constant(0)
  ROOT %dynamic-update-slice.29 = f32[16,16,128,128]{3,2,1,0:T(8,128)} dynamic-update-slice(%param_0.1605, %convert.233, %param_1.1729, %constant.356, %constant.356, /*index=5*/%constant.356)
}

%body (wide.param.3: (bf16[4,2048,16,128], bf16[4,2048,1,2048], bf16[16,128,128], bf16[16,128,128], u32[])) -> (bf16[4,2048,16,128], bf16[4,2048,1,2048], bf16[16,128,128], bf16[16,128,128], u32[]) {
  %constant.1507 = u32[]{:T(128)} constant(2)
  %wide.param.3 = (bf16[4,2048,16,128]{1,3,0,2:T(8,128)(2,1)S(1)}, bf16[4,2048,1,2048]{3,1,0,2:T(8,128)(2,1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) parameter(0)
  %get-tuple-element.1760 = u32[]{:T(128)} get-tuple-element(%wide.param.3), index=4
  %get-tuple-element.1759 = bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.3), index=3
  %collective-permute-start.4 = (bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%get-tuple-element.1759), channel_id=11, source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,8},{8,9},{9,10},{10,11},{11,12},{12,13},{13,14},{14,15},{15,0}}
  %get-tuple-element.1758 = bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.3), index=2
  %collective-permute-start.5 = (bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%get-tuple-element.1758), channel_id=10, source_target_pairs={{0,15},{1,0},{2,1},{3,2},{4,3},{5,4},{6,5},{7,6},{8,7},{9,8},{10,9},{11,10},{12,11},{13,12},{14,13},{15,14}}
  %convert.240 = s32[]{:T(128)S(6)} convert(%get-tuple-element.1760)
  %bitcast.676 = bf16[4,2048,1,2048]{3,1,0,2:T(8,128)(2,1)} get-tuple-element(%wide.param.3), index=1
  %get-tuple-element.1768 = bf16[4,2048,16,128]{1,3,0,2:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.3), index=0
  %fusion.489 = bf16[16,128,2,128]{3,1,2,0:T(8,128)(2,1)S(1)} fusion(%convert.240, %bitcast.676, %get-tuple-element.1768), kind=kOutput, calls=%fused_computation.116.clone.1
  %collective-permute-done.4 = bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)} collective-permute-done(%collective-permute-start.4)
  %collective-permute-done.5 = bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)} collective-permute-done(%collective-permute-start.5)
  %add.961 = u32[]{:T(128)} add(%get-tuple-element.1760, %constant.1507)
  ROOT %tuple.9 = (bf16[4,2048,16,128]{1,3,0,2:T(8,128)(2,1)S(1)}, bf16[4,2048,1,2048]{3,1,0,2:T(8,128)(2,1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) tuple(%get-tuple-element.1768, %bitcast.676, %collective-permute-done.5, %collective-permute-done.4, %add.961)
}

%condition (wide.param.60: (bf16[4,2048,16,128], bf16[4,2048,1,2048], bf16[16,128,128], bf16[16,128,128], u32[])) -> pred[] {
  %constant.1428 = u32[]{:T(128)} constant(8)
  %wide.param.60 = (bf16[4,2048,16,128]{1,3,0,2:T(8,128)(2,1)S(1)}, bf16[4,2048,1,2048]{3,1,0,2:T(8,128)(2,1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) parameter(0)
  %get-tuple-element.1298 = u32[]{:T(128)} get-tuple-element(%wide.param.60), index=4
  ROOT %compare.23 = pred[]{:T(512)} compare(%get-tuple-element.1298, %constant.1428), direction=LT
}

ENTRY %main (p.0: bf16[4,2048,16,128], p.1: bf16[4,2048,1,2048], p.2: bf16[16,128,128], p.3: f32[16,16,128,128], p.4: s32[]) -> f32[16,16,128,128] {
  %constant.1 = u32[]{:T(128)} constant(0)
  %p.0 = bf16[4,2048,16,128]{1,3,0,2:T(8,128)(2,1)S(1)} parameter(0)
  %p.1 = bf16[4,2048,1,2048]{3,1,0,2:T(8,128)(2,1)} parameter(1)
  %p.2 = bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)} parameter(2)
  %p.3 = f32[16,16,128,128]{3,2,1,0:T(8,128)} parameter(3)
  %p.4 = s32[]{:T(128)S(6)} parameter(4)
  %tuple.377 = (bf16[4,2048,16,128]{1,3,0,2:T(8,128)(2,1)S(1)}, bf16[4,2048,1,2048]{3,1,0,2:T(8,128)(2,1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) tuple(%p.0, %p.1, %p.2, %p.2, %constant.1)
  %while.72 = (bf16[4,2048,16,128]{1,3,0,2:T(8,128)(2,1)S(1)}, bf16[4,2048,1,2048]{3,1,0,2:T(8,128)(2,1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}) while(%tuple.377), condition=%condition, body=%body
  %get-tuple-element.1 = bf16[16,128,128]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%while.72), index=2
  ROOT %convert_dynamic-update-slice_fusion = f32[16,16,128,128]{3,2,1,0:T(8,128)} fusion(%p.3, %p.4, %get-tuple-element.1), kind=kLoop, calls=%fused_computation.325.clone.1
}
"""

# GPT-2 on v5p with fsdp=8,tensor=2 and reductions offloaded to SparseCores.
SPARSECORE = """\
HloModule jit_train_step, is_scheduled=true, num_partitions=16

%add.clone.clone.1 (x.35: bf16[], y.35: bf16[]) -> bf16[] {
  %x.35 = bf16[]{:T(256)} parameter(0)
  %y.35 = bf16[]{:T(256)} parameter(1)
  ROOT %add.1528 = bf16[]{:T(256)} add(%x.35, %y.35)
}, execution_thread="sparsecore"

%called_computation.14 (param_0.2056: bf16[8,1024,768]) -> bf16[8,1024,768] {
  %param_0.2056 = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} parameter(0)
  %tuple.351 = (bf16[8,1024,768]{2,1,0:T(8,128)(2,1)}) tuple(%param_0.2056)
  %get-tuple-element.2878 = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} get-tuple-element(%tuple.351), index=0
  ROOT %all-reduce.90 = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} all-reduce(%get-tuple-element.2878), channel_id=3, replica_groups=[8,2]<=[16], use_global_device_ids=true, to_apply=%add.clone.clone.1
}, execution_thread="sparsecore"

%async_computation.7 (param_0.2040: bf16[8,1024,768]) -> bf16[8,1024,768] {
  %param_0.2040 = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %custom-call.37 = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} custom-call(%param_0.2040), custom_call_target="TODO(b/522284627)", called_computations={%called_computation.14}
}, execution_thread="sparsecore"

ENTRY %main (p.0: bf16[8,1024,768], p.1: bf16[8,1024,768]) -> (bf16[8,1024,768], bf16[8,1024,768]) {
  %p.0 = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} parameter(1)
  %all-reduce.84.cloned.1.call-start = ((), (), (s32[1581056]{0:T(1024)}, s32[29]{0:T(1)S(11)})) async-start(), async_execution_thread="sparsecore", calls=%async_computation.7
  %copy.1 = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} copy(%p.0)
  %all-reduce.84.cloned.1.call-update = ((bf16[8,1024,768]{2,1,0:T(8,128)(2,1)}), bf16[8,1024,768]{2,1,0:T(8,128)(2,1)}, (s32[1581056]{0:T(1024)}, s32[29]{0:T(1)S(11)})) async-update(%all-reduce.84.cloned.1.call-start, %copy.1), output_to_operand_aliasing={{2,0}: (0, {2,0}), {2,1}: (0, {2,1})}
  %copy.2 = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} copy(%p.1)
  %all-reduce.84.cloned.1.call-done = bf16[8,1024,768]{2,1,0:T(8,128)(2,1)} async-done(%all-reduce.84.cloned.1.call-update)
  ROOT %tuple.1 = (bf16[8,1024,768]{2,1,0:T(8,128)(2,1)}, bf16[8,1024,768]{2,1,0:T(8,128)(2,1)}) tuple(%all-reduce.84.cloned.1.call-done, %copy.2)
}
"""

# 4 heads, 2048 positions, width 128, blocks of 512, causal. The attributes of the kernel
# span several lines.
KERNEL = r"""HloModule jit_f, is_scheduled=true

ENTRY %main (q.1: bf16[4,2048,128], k.1: bf16[4,2048,128], v.1: bf16[4,2048,128]) -> bf16[4,2048,128] {
  %constant.10 = s8[1,4,4]{2,1,0:T(4,128)(4,1)} constant({...})
  %q.1 = bf16[4,2048,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %k.1 = bf16[4,2048,128]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %v.1 = bf16[4,2048,128]{2,1,0:T(8,128)(2,1)} parameter(2)
  %splash_mha_fwd_residuals.1 = (f32[512,128]{1,0:T(8,128)S(1)}, bf16[4,2048,128]{2,1,0:T(8,128)(2,1)}) custom-call(%constant.10, %q.1, %k.1, %v.1), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,4,4]{2,1,0}, bf16[4,2048,128]{2,1,0}, bf16[4,2048,128]{2,1,0}, bf16[4,2048,128]{2,1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\"block_q\": 512, \"block_kv\": 512, \"block_kv_compute\": 512, \"block_q_dkv\": 512, \"block_kv_dkv\": 512, \"use_fused_bwd_kernel\": true}"
}}, metadata={op_name="jit(f)/jvp(static_sparsity_splash)/jit(_splash_attention)/splash_mha_fwd_residuals/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzvUgFNTElSMjIuMC4wZ2l0AAE="}}
  ROOT %get-tuple-element.1 = bf16[4,2048,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%splash_mha_fwd_residuals.1), index=1
}
"""

# For 16 H100s: a gather that overlaps with a product, a reduce-scatter in a computation
# called by async-start, and a synchronous pair.
GPU = """\
HloModule jit_train_step, is_scheduled=true, num_partitions=16

%add.clone (x.1: bf16[], y.1: bf16[]) -> bf16[] {
  %x.1 = bf16[] parameter(0)
  %y.1 = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%x.1, %y.1)
}

%async_computation.2 (param_0.1: bf16[2048,32000]) -> bf16[128,32000] {
  %param_0.1 = bf16[2048,32000]{1,0} parameter(0)
  ROOT %reduce-scatter.3 = bf16[128,32000]{1,0} reduce-scatter(%param_0.1), channel_id=20, replica_groups=[1,16]<=[16], use_global_device_ids=true, dimensions={0}, to_apply=%add.clone
}

ENTRY %main (p.0: bf16[128,2,5632], p.1: bf16[2048,32000], p.2: bf16[8192,2048], p.3: bf16[2048,2048], p.4: f32[2048]) -> (bf16[2048,2,5632], bf16[128,32000], bf16[8192,2048], f32[2048]) {
  %p.0 = bf16[128,2,5632]{2,1,0} parameter(0)
  %p.1 = bf16[2048,32000]{1,0} parameter(1)
  %p.2 = bf16[8192,2048]{1,0} parameter(2)
  %p.3 = bf16[2048,2048]{1,0} parameter(3)
  %p.4 = f32[2048]{0} parameter(4)
  %all-gather-start.4 = (bf16[128,2,5632]{2,1,0}, bf16[2048,2,5632]{2,1,0}) all-gather-start(%p.0), channel_id=3, replica_groups=mesh['axis_0'=16,'axis_1'=1,'axis_2'=1] {'axis_0'}, dimensions={0}, use_global_device_ids=true, backend_config={"collective_backend_config":{"is_sync":false,"is_pipelined":false}}
  %reduce-scatter-start.1 = ((bf16[2048,32000]{1,0}), bf16[128,32000]{1,0}) async-start(%p.1), calls=%async_computation.2, backend_config={"collective_backend_config":{"is_sync":false,"is_pipelined":false}}
  %dot.1 = bf16[8192,2048]{1,0} dot(%p.2, %p.3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-gather-done.4 = bf16[2048,2,5632]{2,1,0} all-gather-done(%all-gather-start.4)
  %reduce-scatter-done.1 = bf16[128,32000]{1,0} async-done(%reduce-scatter-start.1)
  %all-reduce-start.9 = f32[2048]{0} all-reduce-start(%p.4), channel_id=30, replica_groups=[1,16]<=[16], use_global_device_ids=true, to_apply=%add.clone, backend_config={"collective_backend_config":{"is_sync":true,"is_pipelined":false}}
  %all-reduce-done.9 = f32[2048]{0} all-reduce-done(%all-reduce-start.9)
  ROOT %tuple.1 = (bf16[2048,2,5632]{2,1,0}, bf16[128,32000]{1,0}, bf16[8192,2048]{1,0}, f32[2048]{0}) tuple(%all-gather-done.4, %reduce-scatter-done.1, %dot.1, %all-reduce-done.9)
}
"""
