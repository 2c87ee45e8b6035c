"""Reversible schemes: the backward pass computes the states again from the last ones.

A step of such a scheme couples two states once or twice:

    (u, v) -> (v, w),   w = c u + (1 - c) v + Psi(v; W)                         advance
    (v, w) -> (u, v),   u = (w - (1 - c) v - Psi(v; W)) / c                     reverse

Whatever the increment Psi is, the way back needs only Psi itself, at a state that is already there.
So the backward pass stores the pair at t = 1 alone, and its memory does not grow with the number of
steps. In floating point, u comes back with a rounding error; each way back multiplies earlier ones
by 1 / c.

    leapfrog             c = 1,  Psi = 2 dt F(v)
    McCallum and Foster  c = coupling,  Psi = Psi_dt(v), then c = 1,  Psi = -Psi_-dt(v)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from t5x_diffeq.layers.array_types import Tree, Vector
from t5x_diffeq.ode.solvers import Scheme, VectorField

Stages = tuple[Tree, ...]  # the weights at each node of a step
StepInputs = tuple[Tree, Array | None]  # weights and dropout key of a step, or stacked of all
Bind = Callable[[StepInputs], tuple[VectorField, Stages]]


class Pair(NamedTuple):
    """Two states, and how many steps were taken."""

    u: Vector
    v: Vector
    n: Int[Array, ""]


_At = tuple[Pair, tuple[Vector, Vector]]  # a pair, and the cotangents of its states
_NO_COTANGENT: Any = None  # of integers and keys


@dataclass(frozen=True)
class Coupling:
    """(u, v) -> (v, c u + (1 - c) v + Psi(v; W)).

    Attributes:
      increment: Psi, of the field, the weights of the step, v, the step size and the step's number.
      c: the share of u, in (0, 1].
    """

    increment: Callable[[VectorField, Stages, Vector, float, Int[Array, ""]], Vector]
    c: float = 1.0

    def advance(self, u: Vector, v: Vector, increment: Vector) -> tuple[Vector, Vector]:
        """(v, w) from (u, v), given Psi(v)."""
        mixed = u if self.c == 1 else self.c * u + (1 - self.c) * v
        return v, mixed + increment

    def reverse(self, v: Vector, w: Vector, increment: Vector) -> tuple[Vector, Vector]:
        """(u, v) from (v, w), given Psi(v)."""
        mixed = w - increment
        return mixed if self.c == 1 else (mixed - (1 - self.c) * v) / self.c, v

    def pull_back(self, dv: Vector, dw: Vector, through: Vector) -> tuple[Vector, Vector]:
        """The cotangents of (u, v) from those of (v, w), and from what Psi passes on to v."""
        if self.c == 1:
            return dw, dv + through
        return self.c * dw, dv + (1 - self.c) * dw + through


@dataclass(frozen=True)
class ReversibleScheme(Scheme):
    """A scheme whose steps are couplings of two states.

    Attributes:
      couplings: of a step, one after the other.
      result: which of the two states, at the end of a step, approximates y.
    """

    couplings: tuple[Coupling, ...]
    result: Callable[[Pair], Vector]

    def start(self, y: Vector) -> Pair:
        """Both states are y(0)."""
        return Pair(y, y, jnp.zeros((), jnp.int32))

    def end(self, carried: Pair) -> Vector:
        """The one of the two states that approximates y."""
        return self.result(carried)


def _scheme(
    *couplings: Coupling, result: Callable[[Pair], Vector], nodes: tuple[float, ...], **counts
) -> ReversibleScheme:
    def step(field: VectorField, W: Stages, pair: Pair, dt: float) -> Pair:
        u, v, n = pair
        for each in couplings:
            u, v = each.advance(u, v, each.increment(field, W, v, dt, n))
        return Pair(u, v, n + 1)

    return ReversibleScheme(step, nodes, couplings=couplings, result=result, **counts)


def leapfrog() -> ReversibleScheme:
    """Leapfrog, the explicit two-step midpoint rule: y[n+1] = y[n-1] + 2 dt F(y[n]); order 2.

    It takes one evaluation a step, and the first step is Euler's. It is weakly stable only (Hairer,
    Norsett and Wanner 1993, section III.9): where the field contracts, its second solution, which
    alternates in sign, grows.
    """

    def increment(field: VectorField, W: Stages, v: Vector, dt: float, n: Int[Array, ""]) -> Vector:
        (W0,) = W
        return jnp.where(n == 0, dt, 2 * dt) * field(W0, v)

    return _scheme(
        Coupling(increment),
        result=lambda pair: pair.v,
        nodes=(0.0,),
        order=2,
        evaluations=(1, 1),
    )


def reversible(base: Scheme, coupling: float = 0.99) -> ReversibleScheme:
    """The reversible scheme made of a one-step scheme y + Psi_dt(t, y), with its order.

    McCallum and Foster 2024, "Efficient, accurate and stable gradients for neural ODEs":

        y[n+1] = coupling y[n] + (1 - coupling) z[n] + Psi_dt(t[n], z[n])
        z[n+1] = z[n] - Psi_-dt(t[n+1], y[n+1])

    from y(0) = z(0). The second line is a step of the base back in time, which reads W at
    t[n+1] - c dt where the base has its node c; so a step has the nodes c and 1 - c.

    Its error is that of the base where N (1 - coupling) is far above 1, because y and z then stay
    together. Where it is far below 1, the error has another factor, with the same order. Between
    the two, near N = 1 / (1 - coupling), the factor changes with N: the error of a scheme of order
    1 falls like N^-0.8 or N^-1.6 there.

    Args:
      base: the one-step scheme.
      coupling: in (0, 1]. Near 1, the state is reconstructed most accurately; smaller values hold y
        and z together, and N steps magnify rounding errors by up to coupling^-N on the way back.
    """
    nodes = tuple(sorted({at for c in base.nodes for at in (c, 1 - c)}))
    ahead, back = ([nodes.index(at(c)) for c in base.nodes] for at in (float, lambda c: 1 - c))

    def forward(field: VectorField, W: Stages, z: Vector, dt: float, n: Int[Array, ""]) -> Vector:
        return base.step(field, tuple(W[i] for i in ahead), z, dt) - z

    def backward(field: VectorField, W: Stages, y: Vector, dt: float, n: Int[Array, ""]) -> Vector:
        return y - base.step(field, tuple(W[i] for i in back), y, -dt)

    of_f, of_g = base.evaluations
    return _scheme(
        Coupling(forward, coupling),
        Coupling(backward),
        result=lambda pair: pair.u,
        nodes=nodes,
        order=base.order,
        evaluations=(2 * of_f, 2 * of_g),
    )


def scan_and_reconstruct(
    scheme: ReversibleScheme,
    bind: Bind,
    dt: float,
    pair: Pair,
    inputs: StepInputs,
    unroll: int = 1,
) -> Pair:
    """`lax.scan` of the scheme's steps, whose backward pass stores the last pair alone.

    The backward pass evaluates Psi once for each coupling, at the state that it reads, for both its
    value and its derivative: as much as if each step were recomputed from a stored state.

    Args:
      scheme: the scheme.
      bind: the field and the weights at a step's nodes, from the step's slice of `inputs`. The
        dropout key is the same both ways, so a step drops the same units.
      dt: the step size.
      pair: what `scheme.start` returns.
      inputs: weights `[N, ...]` and dropout keys `[N]`, or None, of all steps.
      unroll: how many steps one iteration of the compiled loop computes.
    """

    @jax.named_scope("solver step")
    def step(pair: Pair, inputs: StepInputs) -> tuple[Pair, None]:
        field, W = bind(inputs)
        return scheme.step(field, W, pair, dt), None

    @jax.named_scope("solver step")
    def back(at: _At, inputs: StepInputs) -> tuple[_At, Tree]:
        return _step_back(scheme, bind, dt, *at, inputs)

    def run(pair: Pair, inputs: StepInputs) -> Pair:
        return jax.lax.scan(step, pair, inputs, unroll=unroll)[0]

    def forward(pair: Pair, inputs: StepInputs) -> tuple[Pair, tuple[Pair, StepInputs]]:
        end = run(pair, inputs)
        return end, (end, inputs)

    def backward(saved: tuple[Pair, StepInputs], d_end: Pair) -> tuple[Pair, StepInputs]:
        end, inputs = saved
        at = end, (d_end.u, d_end.v)
        (_, d_start), d_weights = jax.lax.scan(back, at, inputs, reverse=True, unroll=unroll)
        return Pair(*d_start, n=_NO_COTANGENT), (d_weights, _NO_COTANGENT)

    reconstructing = jax.custom_vjp(run)
    reconstructing.defvjp(forward, backward)
    return reconstructing(pair, inputs)


def _step_back(
    scheme: ReversibleScheme,
    bind: Bind,
    dt: float,
    after: Pair,
    d_after: tuple[Vector, Vector],
    inputs: StepInputs,
) -> tuple[_At, Tree]:
    """The pair before a step with its cotangent, and the cotangent of the step's weights."""
    (v, w, n), (dv, dw) = after, d_after
    weights, key = inputs
    of_couplings = []
    for coupling in reversed(scheme.couplings):

        def increment(v: Vector, weights: Tree, coupling: Coupling = coupling) -> Vector:
            return coupling.increment(*bind((weights, key)), v, dt, n - 1)

        value, pull_back = jax.vjp(increment, v, weights)
        through, d_weights = pull_back(dw)
        v, w = coupling.reverse(v, w, value)
        dv, dw = coupling.pull_back(dv, dw, through)
        of_couplings.append(d_weights)
    total = jax.tree.map(lambda *each: sum(each[1:], start=each[0]), *of_couplings)
    return (Pair(v, w, n - 1), (dv, dw)), total
