"""Integration of the residual stream: a scan over solver steps whose weights are already made.

The scan carries the scheme's memory, which is the state alone unless the scheme remembers more. If
the memory grows from step to step, the steps are unrolled.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array

from t5x_diffeq.model.layers.array_types import Tree, Vector
from t5x_diffeq.model.ode.solvers import Memory, Scheme, SubField, VectorField, find_scheme, grid
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.errors import InputError

FieldOfKey = Callable[[Array | None], VectorField]
Args = Any  # what a field reads besides weights and state: a tree of arrays without a gradient
StepInputs = tuple[Tree, Array | None]  # weights and dropout key of a step, or all steps' stacked
Step = Callable[[Memory, StepInputs], Memory]
_Cache = Any  # what one evaluation of f keeps of earlier tokens: a tree of arrays
SubFieldWithCache = Callable[[Tree, Vector, _Cache], tuple[Vector, _Cache]]

# What "keep:..." can name: values that the layers mark with `checkpoint_name`.
CHECKPOINT_NAMES = ("qkv", "attention", "mlp", "fp8")
# By name, the primitives all of whose results are kept. cuDNN's backward pass needs the output and
# the log-sum-exp of the scores; if either is missing, the forward kernel runs again.
_KEPT_PRIMITIVES = {"attention": "dot_product_attention_fwd"}


def integrate(
    field: Callable[[Args], FieldOfKey],
    weights: Tree,
    y: Vector,
    args: Args = None,
    *,
    scheme: str | Scheme,
    num_steps: int,
    step_size: float,
    remat: str = "none",
    unroll: int = 1,
    kept_dtype: DTypeLike | None = None,
    row_major: bool = False,
    key: Array | None = None,
) -> Vector:
    """Integrates y from t = 0 to t = 1; with its running costs, if y is a `StateWithCost`.

    Args:
      field: the vector field, given `args` and then the dropout key of the step (one key per step,
        so that all stages of a step drop the same units).
      weights: leaves `[nodes, ...]`, in the order of `solvers.grid`.
      args: what the field reads besides weights and state, such as the tokens' places. The field
        must not capture such arrays: of two nested functions with custom gradients, JAX can't lower
        the inner one if it captures arrays.
      remat: "none", "dots", "full", or "keep:a,b" (store the values named a and b, each one of
        `CHECKPOINT_NAMES`).
      unroll: how many solver steps one iteration of the compiled loop computes.
      kept_dtype: dtype in which "full" stores the state of each step for the backward pass; None:
        the state's own dtype. A memory that is more than the state is stored in its own dtypes.
      row_major: whether the last axis of what the scan carries must be contiguous in memory.
        Otherwise XLA carries a TPU's state as the last product writes it, with the length
        contiguous, and the backward pass copies each stored state before a norm reads it.
    """
    solver = find_scheme(scheme)
    inputs = step_inputs(weights, scheme, num_steps, key)

    def step_of(args: Args) -> Step:
        field_of_key = field(args)
        # In other schemes, a sub-field reads a state that depends on the other sub-field's value,
        # which the backward pass would then compute once more.
        if remat == "full" and solver.layer == "parallel":
            field_of_key = _recompute_in_turn(field_of_key)
        step = step_function(field_of_key, scheme, step_size)
        return (lambda memory, inputs: _row_major(step(memory, inputs))) if row_major else step

    memory = solver.begin(y, num_steps)
    if remat == "full" and kept_dtype not in (None, y.dtype) and not solver.remembers:
        memory = _scan_and_recompute(step_of, args, memory, inputs, unroll, kept_dtype)
    else:
        step = _with_remat(step_of(args), remat, num_steps if solver.grows else unroll)
        memory = _last_memory(step, memory, inputs, unroll, solver.grows)
    return solver.end(memory)


def trajectory(
    field: Callable[[Args], FieldOfKey],
    weights: Tree,
    y: Vector,
    args: Args = None,
    *,
    scheme: str | Scheme,
    num_steps: int,
    step_size: float,
) -> Vector:
    """The N + 1 states at t = 0, 1/N, ..., 1, stacked; the arguments are those of `integrate`."""
    solver = find_scheme(scheme)
    step = step_function(field(args), scheme, step_size)
    inputs = step_inputs(weights, scheme, num_steps, key=None)
    last, before = scan_steps(
        lambda m, x: (step(m, x), solver.end(m)), solver.begin(y, num_steps), inputs, solver.grows
    )
    return jnp.concatenate((before, solver.end(last)[None]))


def integrate_with_caches(
    f: SubFieldWithCache,
    g: SubField,
    weights: list[Tree],
    y: Vector,
    caches: list[_Cache],
    *,
    scheme: str,
    step_size: float,
) -> tuple[Vector, list[_Cache]]:
    """y(1) from y(0) of new tokens, and the caches of f with these tokens added.

    A scheme's step evaluates sub-fields of weights and state, as in a textbook, and knows of no
    cache. So this function gives each evaluation of f a cache of its own. The scheme's memory holds
    the new tokens alone. The steps are unrolled: for a token or two, most of the time goes into
    reading weights, and a scan would first copy the weights of each step.

    Args:
      weights: the weights of each step, from `weights_by_step`.
      caches: one for each evaluation of f, in the order of the evaluations.
    """
    before, after = iter(caches), []

    def f_with_next_cache(W: Tree, y: Vector) -> Vector:
        value, cache = f(W, y, next(before))
        after.append(cache)
        return value

    solver, field = find_scheme(scheme), VectorField(f_with_next_cache, g)
    memory = solver.begin(y, len(weights))
    for n, step_weights in enumerate(weights):
        step = step_function(lambda _: field, scheme, step_size, scope=f"step {n}")
        memory = step(memory, (step_weights, None))
    return solver.end(memory), after


def weights_by_step(weights: Tree, scheme: str, num_steps: int) -> list[Tree]:
    """The weights of a forward pass, one tree per step, with leaves `[nodes per step, ...]`."""
    stacked, _ = step_inputs(weights, scheme, num_steps, key=None)
    return [jax.tree.map(lambda w, n=n: w[n], stacked) for n in range(num_steps)]


def step_function(
    field: FieldOfKey, scheme: str | Scheme, step_size: float, scope: str = "solver step"
) -> Step:
    """One step of the scheme, as a function of its memory and the step's slice of `step_inputs`.

    A profile shows the step's operations under `scope`. In a scan, all steps are one program and
    share a name.
    """
    solver = find_scheme(scheme)

    @jax.named_scope(scope)
    def step(memory: Memory, inputs: StepInputs) -> Memory:
        W, key = inputs
        at_nodes = (jax.tree.map(lambda w, i=i: w[i], W) for i in range(len(solver.nodes)))
        return solver.step(field(key), tuple(at_nodes), memory, step_size)

    return step


def _row_major(memory: Memory) -> Memory:
    """The same arrays, whose last axis is contiguous in memory."""

    def constrain(y: Array) -> Array:
        constrained: Array = with_layout_constraint(y, Layout(tuple(range(y.ndim))))
        return constrained

    return jax.tree.map(constrain, memory)


def _recompute_in_turn(field: FieldOfKey) -> FieldOfKey:
    """The same field, of which the backward pass recomputes f and g one after the other.

    The weights and activations of f and g are then never in memory at the same time.
    """

    def in_turn(key: Array | None) -> VectorField:
        f_and_g = field(key)
        return type(f_and_g)(*map(jax.checkpoint, f_and_g))

    return in_turn


def step_inputs(
    weights: Tree, scheme: str | Scheme, num_steps: int, key: Array | None
) -> StepInputs:
    """Each step's weights, leaves `[N, nodes per step, ...]`, and its dropout key."""
    nodes = len(find_scheme(scheme).nodes)
    by_step = jax.tree.map(lambda w: w.reshape(num_steps, nodes, *w.shape[1:]), weights)
    return by_step, None if key is None else jax.random.split(key, num_steps)


def _with_remat(step: Step, remat: str, unroll: int) -> Step:
    """The step with a backward pass that recomputes all values that `remat` doesn't store."""
    if remat == "none":
        return step
    policy = None
    if remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    elif remat != "full":
        policy = _keep_policy(remat)
    # Inside a scan, XLA can't merge the recomputation with the forward pass. If steps are unrolled,
    # XLA can, unless `prevent_cse` forbids it. With "dots" and "keep" it is allowed: XLA then
    # stores what it would compute twice, which is faster on an H100.
    return jax.checkpoint(step, policy=policy, prevent_cse=unroll > 1 and remat == "full")


def _scan_and_recompute(
    step_of: Callable[[Args], Step],
    args: Args,
    y: Vector,
    inputs: StepInputs,
    unroll: int,
    kept_dtype: DTypeLike,
) -> Vector:
    """The scan, with a backward pass that recomputes each step from its inputs.

    Only these inputs are stored, and the states among them in `kept_dtype`. Float32 states would
    take twice the memory of bfloat16 states. The norm that reads a state rounds its result to
    bfloat16 anyway, so the gradient is as accurate.
    """
    dtype = y.dtype

    @jax.custom_vjp
    def run(args: Args, y: Vector, inputs: StepInputs) -> Vector:
        return _last_memory(step_of(args), y, inputs, unroll)

    def forward(args: Args, y: Vector, inputs: StepInputs) -> tuple[Vector, tuple]:
        step = step_of(args)

        def keep(y: Vector, x: StepInputs) -> tuple[Vector, Vector]:
            return step(y, x), y.astype(kept_dtype)

        y, kept = jax.lax.scan(keep, y, inputs, unroll=unroll)
        return y, (args, kept, inputs)

    def backward(residuals: tuple, dy: Vector) -> tuple[None, Vector, StepInputs]:
        args, *step_residuals = residuals
        step = step_of(args)

        def back(dy: Vector, at: tuple[Vector, StepInputs]) -> tuple[Vector, Tree]:
            y, (W, key) = at
            # Without a barrier, XLA recomputes many unrolled steps at once, and their activations
            # are in memory together.
            if unroll > 1:
                dy, y = jax.lax.optimization_barrier((dy, y))
            _, pull_back = jax.vjp(lambda y, W: step(y, (W, key)), y.astype(dtype), W)
            return pull_back(dy)

        dy, dW = jax.lax.scan(back, dy, tuple(step_residuals), reverse=True, unroll=unroll)
        return None, dy, (dW, None)  # neither args nor keys have a gradient

    run.defvjp(forward, backward)
    return run(args, y, inputs)


def _last_memory(
    step: Step, memory: Memory, inputs: StepInputs, unroll: int, grows: bool = False
) -> Memory:
    memory, _ = scan_steps(lambda m, x: (step(m, x), None), memory, inputs, grows, unroll)
    return memory


def scan_steps(
    step: Callable[[Memory, StepInputs], tuple[Memory, Tree]],
    memory: Memory,
    inputs: StepInputs,
    grows: bool,
    unroll: int = 1,
) -> tuple[Memory, Tree]:
    """The last memory, and what the steps return besides memories, stacked: leaves `[N, ...]`.

    If the memory grows (`Scheme.grows`), its shape differs from step to step, so the steps are
    unrolled.
    """
    if not grows:
        return jax.lax.scan(step, memory, inputs, unroll=unroll)
    leaves, tree = jax.tree.flatten(inputs)
    outputs = []
    # `unstack`, because the gradient of every single index would be as large as the whole stack.
    for step_leaves in zip(*map(jnp.unstack, leaves), strict=True):
        memory, output = step(memory, jax.tree.unflatten(tree, step_leaves))
        outputs.append(output)
    return memory, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def _keep_policy(remat: str) -> Callable[..., bool]:
    names = kept_names(remat)
    is_named = jax.checkpoint_policies.save_only_these_names(*names)
    primitives = tuple(p for name, p in _KEPT_PRIMITIVES.items() if name in names)

    def keeps(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        is_kept: bool = is_named(primitive, *arguments, **parameters)
        return is_kept or primitive.name.startswith(primitives)

    return keeps


def kept_names(remat: str) -> tuple[str, ...]:
    """The names (a, b) in the `model.remat` "keep:a,b"; an InputError if one is unknown."""
    names = tuple(remat.removeprefix("keep:").split(","))
    for name in names:
        if name not in CHECKPOINT_NAMES:
            raise InputError(
                f"model.remat={remat} keeps {name!r}; it can keep {', '.join(CHECKPOINT_NAMES)}, "
                f"as in keep:{','.join(CHECKPOINT_NAMES)}"
            )
    return names


@checked
def integrate_field(
    field: VectorField | Callable[[Tree, Vector], Vector],
    weights: Tree | Callable[[Array], Tree],
    y: float | Sequence[float] | np.ndarray | Array,
    *,
    scheme: str | Scheme = "euler",
    num_steps: int,
    keep: bool = False,
) -> Array:
    """y(1) of dy/dt = field(W(t), y) from y(0); differentiable with respect to weights and y.

    Args:
      field: the field, or a `VectorField` of two sub-fields that a splitting scheme takes in turn.
      weights: W(t), as a function of the times at which the scheme reads it, `[nodes]`, or as its
        values there: a tree of arrays `[nodes, ...]` in the order of `grid(scheme, num_steps)`.
      y: the state at t = 0, an array of any shape.
      scheme: a scheme's name, such as "rk4", the importable name of one of another package, or a
        `Scheme`.
      num_steps: the number of solver steps.
      keep: whether to return the states at t = 0, 1/N, ..., 1, stacked, instead of the last one.

    Raises:
      InputError: if there is no such scheme, if the weights have no leaves or another number of
        nodes, or if the field doesn't map W and y to a derivative of y.
    """
    times = grid(scheme, num_steps).reshape(-1)
    stacked = weights(jnp.asarray(times)) if callable(weights) else weights
    if not jax.tree.leaves(stacked):
        raise InputError(
            f"the weights {stacked!r} have no leaf; a field without weights can take `grid`"
        )
    for leaf in jax.tree.leaves(stacked):
        if jnp.ndim(leaf) == 0 or len(leaf) != len(times):
            hint = "; a list is a tree of leaves, so give an array" if type(stacked) is list else ""
            named = scheme if isinstance(scheme, str) else "this scheme"
            raise InputError(
                f"the weights have a leaf of shape {jnp.shape(leaf)}; {num_steps} steps of "
                f"{named} read them at {len(times)} times, which must be its first axis{hint}"
            )
    if not isinstance(field, VectorField):
        field = VectorField(field, lambda W, y: jnp.zeros_like(y))
    if not all(map(callable, field)):
        raise InputError(f"field={field!r}; its f and g must be functions of W and y")
    solve = trajectory if keep else integrate
    y = jnp.asarray(y) + 0.0  # whole numbers become floats
    for sub_field in field:
        try:
            takes = inspect.signature(sub_field)
            takes.bind(None, None)
        except ValueError:  # a built-in function has no signature
            continue
        except TypeError as error:
            raise InputError(f"field takes {takes}; it must take W and y: {error}") from error
        if next(iter(takes.parameters)) == "y":
            raise InputError(f"field takes {takes}; the weights come first: field(W, y)")
    for sub_field in field:
        given = jax.eval_shape(sub_field, jax.tree.map(lambda w: jnp.asarray(w)[0], stacked), y)
        shape = getattr(given, "shape", (0,) * (y.ndim + 1))
        ends = zip(reversed(shape), reversed(y.shape), strict=False)
        if len(shape) > y.ndim or any(own not in (1, size) for own, size in ends):
            raise InputError(f"field gives {given}, where dy/dt has the shape {y.shape} of y")
        if jnp.result_type(given.dtype, y.dtype) != y.dtype:
            raise InputError(
                f"field gives {given.dtype}, and y is {y.dtype}; give y and the weights one dtype"
            )
    return solve(
        lambda args: lambda key: field,
        stacked,
        y,
        scheme=scheme,
        num_steps=num_steps,
        step_size=1 / num_steps,
    )
