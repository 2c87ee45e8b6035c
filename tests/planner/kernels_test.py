"""A GPU's program is taken apart into kernels: products, bytes, operations on elements."""

import pytest

from t5x_diffeq.planner.program_cost import GpuKernel, program_cost

# Written as XLA writes an H100's programs: cuBLAS's calls and cuDNN's, a product by Triton, random
# bits, a buffer that is reserved, and a collective.
TEXT = """HloModule made, is_scheduled=true

%gemm_fusion_dot_computation (a: bf16[64,32], b: bf16[32,16]) -> f32[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %d = f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%bits (x: u32[64,16]) -> f32[64,16] {
  %x = u32[64,16]{1,0} parameter(0)
  %s = u32[64,16]{1,0} shift-right-logical(%x, %x)
  %y = u32[64,16]{1,0} xor(%s, %x)
  %f = f32[64,16]{1,0} convert(%y)
  ROOT %t = f32[64,16]{1,0} tanh(%f)
}

%body (state: (s32[], f32[64,16])) -> (s32[], f32[64,16]) {
  %state = (s32[], f32[64,16]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %v = f32[64,16]{1,0} get-tuple-element(%state), index=1
  %w = u32[64,16]{1,0} bitcast(%v)
  %fusion.1 = f32[64,16]{1,0} fusion(%w), kind=kLoop, calls=%bits
  ROOT %r = (s32[], f32[64,16]{1,0}) tuple(%n, %fusion.1)
}

%condition (c: (s32[], f32[64,16])) -> pred[] {
  %c = (s32[], f32[64,16]{1,0}) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (a: bf16[64,32], b: bf16[32,16], q: f8e4m3fn[64,32]) -> f32[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  %q = f8e4m3fn[64,32]{1,0} parameter(2)
  %one = f32[] constant(1)
  %reserved = f32[1024]{0} custom-call(), custom_call_target="AllocateBuffer"
  %cublas = (bf16[64,16]{1,0}, s8[64]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %cublas8 = (bf16[64,64]{1,0}, s8[64]{0}) custom-call(%q, %q, %one, %one), \
custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %attention = bf16[64,32]{1,0} custom-call(%a, %a, %a), custom_call_target="__cudnn$fmhaSoftmax"
  %sum = bf16[64,32]{1,0} all-reduce(%attention), to_apply=%bits
  %triton = f32[64,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_fusion_dot_computation
  %zero = s32[] constant(0)
  %start = (s32[], f32[64,16]{1,0}) tuple(%zero, %triton)
  %loop = (s32[], f32[64,16]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %end = f32[64,16]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_kernels_of_a_program():
    A, B = 64 * 32, 32 * 16  # elements
    operands = 2 * (A + B)
    assert list(program_cost(TEXT).kernels) == [
        GpuKernel(2 * 64 * 32 * 16, 16, operands + 2 * 64 * 16 + 64, 0, 1),
        GpuKernel(2 * 64 * 32 * 64, 8, 2 * A + 8 + 2 * 64 * 64 + 64, 0, 1),
        GpuKernel(2 * 64 * 32 * 16, 16, operands + 4 * 64 * 16, 0, 1),
        # Two integers' operations, a float's at half of that, a special function at four.
        GpuKernel(0, 0, 2 * 4 * 64 * 16, pytest.approx((2 + 0.5 + 4) * 64 * 16), 5),
    ]
