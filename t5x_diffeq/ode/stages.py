"""Integration over stages: each stage of the mesh takes its own solver steps (GPipe).

The N steps are cut into S consecutive parts, one for each index of the mesh axis `stage`, and the
rows of a batch into M microbatches (Huang et al. 2019). At tick t = 0 .. M + S - 2, stage s takes
its steps with microbatch t - s, and then passes the state on to stage s + 1:

    tick        0   1   2   3   4            M = 3, S = 3
    stage 0     0   1   2   .   .
    stage 1     .   0   1   2   .
    stage 2     .   .   0   1   2

At a dot, a stage computes something that nobody reads, so a pass takes (M + S - 1) / M times as
long as its work. Every microbatch goes through the same steps as without stages, and the backward
pass is the transpose of all this: the states' gradients run from stage to stage in the other
direction.

The weights of all steps are made before, each device making its own part of the kernels of every
step. One exchange between the stages (an all-to-all) then gives each stage the weights of its own
steps, and its transpose returns their gradient. What makes the weights (P, in a hypernetwork)
stays where it is.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from t5x_diffeq.layers.array_types import Tree, Vector
from t5x_diffeq.layers.mesh import STAGE, mesh_axes, num_stages, on_shards, shards_over

# From the weights of a stage, the state, what stands beside its rows, and a key, to the state.
TakeSteps = Callable[[Tree, Vector, Tree, Array | None], Vector]
_FREE = PartitionSpec.UNCONSTRAINED  # of a dimension whose sharding the compiler chooses


def can_pipeline(num_rows: int, num_steps: int, microbatches: int) -> bool:
    """Whether the stages of the context's mesh share these steps, and the microbatches the rows.

    Args:
      num_rows: sequences of the batch.
      num_steps: N.
      microbatches: M.
    """
    stages = num_stages()
    divisible = num_rows % (microbatches * _num_shards()) == 0 and num_steps % stages == 0
    return stages > 1 and microbatches % stages == 0 and divisible


def integrate_in_stages(
    take_steps: TakeSteps,
    weights: Tree,
    y: Vector,
    beside: Tree,
    key: Array | None,
    *,
    microbatches: int,
) -> Vector:
    """y(1) from y(0), where `can_pipeline`; the rows of y(1) are split over the stages, too.

    Leaves of y without dimensions, such as a running cost, are means over the microbatches.

    Args:
      take_steps: integrates over the steps whose weights it is given.
      weights: leaves `[nodes, ...]`, in the order of `schemes.grid`.
      y: the state at t = 0.
      beside: arrays with a row for each of the state's, such as the tokens' positions.
      key: dropout key, from which each stage derives one for each microbatch; or None.
      microbatches: M.
    """
    of_stages = jax.tree.map(lambda w: _constrain(w, STAGE), weights)
    run = jax.shard_map(
        partial(_run_stage, take_steps, microbatches, jax.eval_shape(lambda: y)),
        in_specs=(PartitionSpec(STAGE), *(PartitionSpec(),) * 3),
        out_specs=PartitionSpec(STAGE),
        axis_names={STAGE},
        # Layers may compute on their parts of a batch in a `shard_map` of their own, and those with
        # kernels don't declare over which mesh axes their outputs vary.
        check_vma=False,
    )
    split = partial(jax.tree.map, partial(_split_rows, microbatches=microbatches))
    ends = run(of_stages, split(_in_float32(y)), split(beside), key)
    return jax.tree.map(_merge_rows, ends)


def _run_stage(
    take_steps: TakeSteps,
    microbatches: int,
    like: Vector,
    weights: Tree,
    y: Vector,
    beside: Tree,
    key: Array | None,
) -> Vector:
    """A stage's part of the pass: from y(0) of all microbatches to its share of their y(1)."""
    stage, stages = jax.lax.axis_index(STAGE), num_stages()
    ticks = microbatches + stages - 1
    # After the last microbatch, stage 0 takes that one again rather than zeros, of which a norm may
    # have no derivative.
    begins = jax.tree.map(lambda x: jnp.take(x, jnp.arange(ticks), axis=0, mode="clip"), y)
    wide = _in_float32(weights)

    def tick(before: Vector, inputs: tuple[Vector, Array]) -> tuple[Vector, Vector]:
        begin, t = inputs
        m = jnp.clip(t - stage, 0, microbatches - 1)
        begin, W = _as_before(begin, before), _as_before(wide, weights)
        state = jax.tree.map(partial(jnp.where, stage == 0), begin, before)
        at_rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, m, keepdims=False), beside)
        own_key = None if key is None else jax.random.fold_in(jax.random.fold_in(key, m), stage)
        end = take_steps(W, jax.tree.map(_keep_rows, state), at_rows, own_key)
        end = jax.tree.map(_keep_rows, end)
        onward = [(s, s + 1) for s in range(stages - 1)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE, onward), end), end

    first = _as_before(jax.tree.map(lambda x: x[0], y), like)
    _, ends = jax.lax.scan(tick, first, (begins, jnp.arange(ticks)))

    def share(ends: Array) -> Array:
        """This stage's share of what the last stage has computed."""
        spec = PartitionSpec(None, mesh_axes("batch") or None) if ends.ndim > 1 else PartitionSpec()
        exchange = partial(jax.lax.all_to_all, axis_name=STAGE, split_axis=0, concat_axis=0)
        of_all = on_shards(partial(exchange, tiled=True), (spec,), spec, check_vma=False)
        return of_all(ends[stages - 1 :])[-(microbatches // stages) :]

    return jax.tree.map(share, ends)


def _in_float32(tree: Tree) -> Tree:
    """In the dtype in which gradients are summed, over the ticks and over the stages."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _as_before(tree: Tree, before: Tree) -> Tree:
    """The tree in the dtypes that it had before `_in_float32`."""
    return jax.tree.map(lambda x, like: x.astype(like.dtype), tree, before)


def _num_shards() -> int:
    """The number of parts that a batch is divided into over the context's mesh."""
    return shards_over(mesh_axes("batch"))


def _split_rows(x: Array, microbatches: int) -> Array:
    """`[B, ...]` as `[M, B / M, ...]`, so that every device keeps its own rows; 0 dimensions as M.

    Each device's rows are cut into M consecutive parts.
    """
    if x.ndim == 0:
        return jnp.broadcast_to(x, (microbatches,))
    by_device = x.reshape(_num_shards(), microbatches, -1, *x.shape[1:]).swapaxes(0, 1)
    return by_device.reshape(microbatches, -1, *x.shape[1:])


def _merge_rows(x: Array) -> Array:
    """The inverse of `_split_rows`: `[M, ...]`, split over the stages, as `[B, ...]`."""
    if x.ndim == 1:
        return x.mean()
    by_device = x.reshape(len(x), _num_shards(), -1, *x.shape[2:]).swapaxes(0, 1)
    return _constrain(by_device.reshape(-1, *x.shape[2:]), *mesh_axes("batch"), STAGE)


def _keep_rows(x: Array) -> Array:
    """The microbatch with its rows split as a batch's are."""
    return _constrain(x, *mesh_axes("batch")) if x.ndim else x


def _constrain(x: Array, *axes: str) -> Array:
    """x with its first axis split over these mesh axes, and the others as they are."""
    spec = PartitionSpec(axes or None, *(_FREE,) * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, spec)
