"""Bytes to and from memory are XLA's own count, with loops as often as they run."""

import jax
import jax.numpy as jnp
import pytest

from t5x_diffeq.planner.program_cost import program_cost

W, X = jnp.zeros((6, 256, 256)), jnp.zeros((64, 256))


def apply_unrolled(w, x):
    for n in range(6):
        x = jnp.tanh(x @ w[n])
    return x


def apply_in_loop(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def compile_program(function):
    return jax.jit(function).lower(W, X).compile()


def test_without_loops_it_is_xlas_own_count():
    def adam_like(w, x):
        slope = jax.grad(lambda w: jnp.square(apply_unrolled(w, x)).mean())(w)
        return w - 0.1 * slope / (jnp.sqrt(slope * slope) + 1e-6)

    for function in (apply_unrolled, adam_like):
        program = compile_program(function)
        counted = program.cost_analysis()["bytes accessed"]
        assert program_cost(program.as_text()).memory_bytes == pytest.approx(counted, rel=1e-3)


def test_a_loop_counts_as_often_as_it_runs_and_its_slices_for_themselves():
    looped, whole = (
        program_cost(compile_program(f).as_text()) for f in (apply_in_loop, apply_unrolled)
    )
    assert looped.memory_bytes == pytest.approx(whole.memory_bytes, rel=0.35)
    once = compile_program(apply_in_loop).cost_analysis()["bytes accessed"]
    assert looped.memory_bytes > 2 * once  # XLA counts the body once
    assert looped.cycles is None  # only a TPU's compiler estimates them


TPU = """HloModule made, is_scheduled=true

%fused (p: bf16[16,128,256], n: s32[]) -> bf16[128,256] {
  %p = bf16[16,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %n = s32[] parameter(1)
  %b = bf16[16,128,256]{2,1,0:T(8,128)(2,1)} bitcast(%p)
  ROOT %s = bf16[128,256]{1,0:T(8,128)(2,1)} dynamic-slice(%b, %n)
}

ENTRY %main (w: bf16[16,128,256], n: s32[]) -> bf16[128,256] {
  %w = bf16[16,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %n.1 = s32[]{:S(2)} parameter(1)
  %f = bf16[128,256]{1,0:T(8,128)(2,1)} fusion(%w, %n.1), kind=kLoop, calls=%fused, \
backend_config={"estimated_cycles":"700"}
  %c = (bf16[128,256]{1,0:T(8,128)S(1)}, bf16[128,256]{1,0}, u32[]{:S(2)}) copy-start(%f)
  %d = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%c)
  ROOT %e = bf16[128,256]{1,0:T(8,128)(2,1)} negate(%d), backend_config={"estimated_cycles":"30"}
}
"""


def test_a_tpus_fast_memory_is_free_and_cycles_add_up():
    step = 128 * 256 * 2
    cost = program_cost(TPU)
    # The fusion reads and writes a slice, the copy reads it, the last instruction writes.
    assert cost.memory_bytes == (2 + 1 + 1) * step
    assert cost.cycles == 730


def test_what_the_compiler_does_not_estimate_is_counted_by_its_bytes():
    """libtpu 0.0.50 gives gathers that it offloads the largest number there is."""
    cost = program_cost(TPU.replace('"700"', f'"{2**63 - 1}"'))
    assert cost.cycles == 30
    assert cost.unestimated_bytes == 2 * 128 * 256 * 2
    assert cost.memory_bytes == program_cost(TPU).memory_bytes
    assert program_cost(TPU).unestimated_bytes == 0
