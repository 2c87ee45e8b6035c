"""Muon: every kernel moves by an orthogonal matrix, even if it is a function of time.

Muon (Jordan et al. 2024) averages the gradients of a matrix W into a momentum M = U S V^T and moves
W along R = U V^T, the matrix of spectral norm 1 with the largest inner product with M.
Five Newton-Schulz iterations X <- a X + b (X X^T) X + c (X X^T)^2 X, from M / |M|, bring all
singular values near 1 without a decomposition (`newton_schulz`). The kernels of per-layer weights
are N such matrices, a shared kernel is one.

Time-dependent weights are linear in their parameters. For one kernel at N nodes,

    W = Phi theta,   row n of Phi: (e(t_n), 1),   theta = (P, W0),   gradient: dtheta = Phi^T dW.

Orthogonal directions for the T + 1 matrices of theta would be meaningless, since no token is
multiplied by one of them. Tokens are multiplied by the W(t_n), so these get Muon's direction:

    M <- beta M + (1 - beta) Phi^T dW    momentum, of the shape and sharding of theta
    F  = (Phi^+)^T M                     the momentum of dW: the smallest F with Phi^T F = M
    R_n = U_n V_n^T of F_n               N orthogonal matrices, not T + 1
    dtheta = Phi^+ R                     the smallest dtheta with Phi dtheta = R

The step of theta depends on what counts as small. Here |theta|^2 is s^2 |P|^2 + |W0|^2, where s is
the root mean square of e(t), so that the step of W(t) is the same for any scale of e(t). With
D = diag(1/s, ..., 1/s, 1) and the Gram matrix of the nodes K, the pseudo-inverse is

    Phi^+ = D^2 Phi^T K^+,   K = Phi D^2 Phi^T   [N, N].

Where e(t) at several nodes is nearly dependent (a smooth time embedding, or N > T + 1), no moderate
theta moves W by any R: eigenvectors of K are left out of K^+ if their eigenvalues lie far below the
largest. W then moves by Q R, with the projection Q = K K^+, scaled up to the size of R. This is
still a descent direction: F = Q F, so <F, Q R> = <F, R>, the sum of all singular values of the F_n.

The size of a step: an orthogonal matrix of shape [m, k] has entries of root mean square
max(m, k)^(-1/2). Multiplied by 0.2 max(m, k)^(1/2) (Liu et al. 2025), every kernel moves by 0.2
learning rates per entry, about as far as Adam moves it, so that Adam's learning rate and weight
decay suit Muon. This holds for W(t_n) as it does for the W_n of a layer. With Adam, W(t_n) moves so
only because of the hypernetwork's step multipliers, which Muon doesn't need.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.mesh import axes_of, mesh_sizes, on_shards, spec_of
from t5x_diffeq.model.layers.parameter import Parameter, flatten_parameters, num_inputs
from t5x_diffeq.model.ode.time_dependent_weights import offset_path
from t5x_diffeq.model.ode.weight_source import Embeddings, LeafPath, is_projection
from t5x_diffeq.system.errors import InputError

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b, c (Jordan et al. 2024)
_ITERATIONS = 5
_RMS = 0.2  # root mean square of a step's entries at learning rate 1 (Liu et al. 2025)
# Eigenvalues of K below this part of the largest are left out. At 1e-3, P moves at most 30 times as
# far as the strongest direction would ask for. A time embedding with time_scale=1000 and T = 48
# keeps all of 12 nodes, one with time_scale=10 keeps 5.
_CUTOFF = 1e-3


class Kernel(NamedTuple):
    """A kernel of the block, and where its parameters are."""

    path: LeafPath  # the path of W, or of P if W is a function of time
    offset: LeafPath | None  # the path of W0; None unless W is a function of time
    stacked: bool  # whether the parameter at `path` has a leading axis, of nodes or of T
    shape: tuple[int, ...]
    names: tuple[str | None, ...]  # its logical axes
    num_inputs: int  # how many dimensions are inputs, not counting axes of separate maps


class MuonState(NamedTuple):
    """The momentum of each kernel's parameters."""

    momentum: Any


def kernels_of_block(declared: dict) -> list[Kernel]:
    """The kernels that the weight source holds or makes, of the parameters that train.

    Raises:
      InputError: if a kernel's axes don't say what its inputs are.
    """
    leaves = flatten_parameters(declared)
    kernels = {
        path: leaf for path, leaf in leaves.items() if path[0] == "source" and leaf.role == "kernel"
    }
    offsets = {offset_path(path) for path, leaf in kernels.items() if is_projection(leaf)}
    for path in sorted(offsets - {*kernels}):
        raise InputError(
            f"optimizer.name=muon needs the parameter {'/'.join(path)}, the W0 of a kernel W0 + P "
            "e(t); declare it in the source, or set optimizer.name=adam"
        )
    return [_kernel(path, leaf) for path, leaf in kernels.items() if path not in offsets]


def _kernel(path: LeafPath, leaf: Parameter) -> Kernel:
    is_time_dependent = is_projection(leaf)
    stacked = is_time_dependent or leaf.names[0] == "steps"
    shape, names = leaf.value.shape[stacked:], leaf.names[stacked:]
    map_shape = [size for size, name in zip(shape, names, strict=True) if name != "maps"]
    try:
        inputs = num_inputs(map_shape, leaf.fan_in)
    except ValueError as error:
        raise InputError(
            f"optimizer.name=muon: the leading axes of {'/'.join(path)}, a kernel of shape {shape} "
            f"with axes {names}, are not its fan_in={leaf.fan_in} inputs; declare inputs before "
            "outputs, and call an axis that counts separate maps 'maps'"
        ) from error
    return Kernel(
        path, offset_path(path) if is_time_dependent else None, stacked, shape, names, inputs
    )


def scale_by_muon(kernels: list[Kernel], beta: float) -> optax.GradientTransformationExtraArgs:
    """The transformation of gradients into Muon's directions, with Nesterov momentum.

    The momentum decays by `beta`. `update` takes `embeddings`, the e(t) at the nodes of the step,
    if weights depend on time. Only the parameters of the kernels may reach the transformation.
    """

    def init(params: dict) -> MuonState:
        return MuonState(optax.tree.zeros_like(params))

    def update(
        gradient: dict,
        state: MuonState,
        params: dict | None = None,
        *,
        embeddings: Embeddings | None = None,
        **_: object,
    ) -> tuple[dict, MuonState]:
        del params
        momentum = optax.tree.update_moment(gradient, state.momentum, beta, 1)
        ahead = flatten_dict(optax.tree.update_moment(gradient, momentum, beta, 1))  # Nesterov
        for kernel in kernels:
            ahead |= _directions(kernel, ahead, embeddings or {})
        return unflatten_dict(ahead), MuonState(momentum)

    return optax.GradientTransformationExtraArgs(init, update)


def _directions(
    kernel: Kernel, momentum: Mapping[LeafPath, Any], embeddings: Embeddings
) -> dict[LeafPath, Array]:
    """The directions of a kernel's parameters, by their paths."""
    M = momentum[kernel.path]
    if kernel.offset is None:
        return {kernel.path: orthogonal(kernel, M if kernel.stacked else M[None]).reshape(M.shape)}
    _, layer, *_ = kernel.path
    step_P, step_W0 = _steps_of_theta(kernel, M, momentum[kernel.offset], embeddings[layer])
    return {kernel.path: step_P, kernel.offset: step_W0}


def _steps_of_theta(
    kernel: Kernel, M: Float[Array, "T ..."], M0: Float[Array, "..."], e: Float[Array, "nodes T"]
) -> tuple[Float[Array, "T ..."], Float[Array, "..."]]:
    """The directions of P and W0, which are parts of Phi^+ R, from their momenta M and M0."""
    inverse, Q = pseudo_inverse(e)
    contract = partial(jnp.tensordot, axes=1, precision="highest")
    R = orthogonal(kernel, contract(inverse[:-1].T, M) + contract(inverse[-1:].T, M0[None]))
    axes = tuple(range(1, R.ndim))
    products = jax.lax.dot_general(R, R, ((axes, axes), ((), ())))  # <R_n, R_m>
    scale = jnp.sqrt(jnp.trace(products) / jnp.maximum((Q * products).sum(), 1e-30))
    return contract(scale * inverse[:-1], R), contract(scale * inverse[-1], R)


def pseudo_inverse(
    e: Float[Array, "nodes T"],
) -> tuple[Float[Array, "features nodes"], Float[Array, "nodes nodes"]]:
    """Phi^+ in the metric of the module's docstring, and Q = Phi Phi^+; there are T + 1 features.

    `e` holds the time embeddings at the nodes, in float32; nodes may repeat.
    """
    Phi = jnp.concatenate((e, jnp.ones_like(e[:, :1])), axis=1)
    squares = jnp.ones(Phi.shape[1]).at[:-1].set(1 / jnp.maximum(jnp.square(e).mean(), 1e-30))
    K = jnp.matmul(Phi * squares, Phi.T, precision="highest")
    values, vectors = jnp.linalg.eigh(K)
    kept = values > _CUTOFF * values[-1]
    inverses = jnp.where(kept, 1 / jnp.where(kept, values, 1), 0)
    K_inverse = jnp.matmul(vectors * inverses, vectors.T, precision="highest")
    Q = jnp.matmul(vectors * kept, vectors.T, precision="highest")
    return jnp.matmul((Phi * squares).T, K_inverse, precision="highest"), Q


def orthogonal(kernel: Kernel, F: Float[Array, "nodes ..."]) -> Float[Array, "nodes ..."]:
    """Muon's direction of a kernel at each node, with entries of root mean square `_RMS`.

    A kernel is one matrix from all its inputs to all its outputs, with heads among them. But q, k
    and v are different maps of one input, so each is orthogonalised by itself. If they were
    orthogonalised together, the map with the largest gradient would determine all directions.
    """
    dimensions = range(len(kernel.names))
    separate = [n for n in dimensions if kernel.names[n] == "maps"]
    others = [n for n in dimensions if n not in separate]
    inputs, outputs = others[: kernel.num_inputs], others[kernel.num_inputs :]
    spec = spec_of(kernel.names) if mesh_sizes() else PartitionSpec()

    def split_by(dimensions: list[int]) -> list[str]:
        """The mesh axes that split these dimensions of the kernel."""
        return [axis for n in dimensions if spec for axis in axes_of(spec[n])]

    def on_device(F: Float[Array, "nodes ..."]) -> Float[Array, "nodes ..."]:
        """This device's part of the orthogonal matrices, not yet scaled."""
        first = [1 + n for n in separate]
        stack = jnp.moveaxis(F, first, range(len(first)))
        rows = prod(F.shape[1 + n] for n in inputs)
        columns = prod(F.shape[1 + n] for n in outputs)
        parts = stack.reshape(-1, rows, columns)
        R = map_whole_matrices(newton_schulz, parts, split_by(inputs), split_by(outputs))
        return jnp.moveaxis(R.reshape(stack.shape), range(len(first)), first)

    m, k = (prod(kernel.shape[n] for n in these) for these in (inputs, outputs))
    node_spec = PartitionSpec(None, *spec)
    R = on_shards(on_device, (node_spec,), node_spec, check_vma=False)(F)
    return _RMS * max(m, k) ** 0.5 * R


def newton_schulz(X: Float[Array, "many m k"]) -> Float[Array, "many m k"]:
    """About U V^T for each matrix U S V^T: singular values are between 0.7 and 1.2.

    A zero matrix stays zero. Accelerators compute in bfloat16, whose errors are smaller than that
    range. CPUs compute in float32, because bfloat16 is slower there.
    """

    def iterate(X: Array, dtype: DTypeLike) -> Array:
        a, b, c = _COEFFICIENTS

        def step(_: Array, X: Array) -> Array:
            A = X @ X.mT
            return a * X + (b * A + c * A @ A) @ X

        return jax.lax.fori_loop(0, _ITERATIONS, step, X.astype(dtype)).astype(jnp.float32)

    with jax.named_scope("newton_schulz"):
        tall = X.shape[1] > X.shape[2]
        X = X.mT if tall else X  # X X^T is then the smaller of the two products
        X /= jnp.linalg.norm(X, axis=(1, 2), keepdims=True) + 1e-12
        X = jax.lax.platform_dependent(
            X,
            cpu=lambda X: iterate(X, jnp.float32),
            default=lambda X: iterate(X, jnp.bfloat16),
        )
        return X.mT if tall else X


def map_whole_matrices(
    function: Callable[[Float[Array, "some m k"]], Float[Array, "some m k"]],
    parts: Float[Array, "many rows columns"],
    row_axes: Sequence[str] = (),
    column_axes: Sequence[str] = (),
) -> Float[Array, "many rows columns"]:
    """This device's parts of `function(matrices)`; under `jax.shard_map`, if there is a mesh.

    The devices exchange parts so that each has some of the matrices whole, and get their own parts
    back afterwards. While the function runs, they exchange nothing. If the compiler gathered what
    each product needs, it would move every matrix in every iteration.

    The function maps each matrix of a stack by itself, and zeros to zeros. It may get rows and
    columns in another order, in which the rows, or columns, of one device are contiguous.
    `row_axes` and `column_axes` are the mesh axes that split rows and columns.
    """
    sizes = mesh_sizes()
    exchanges = [(axis, 1) for axis in row_axes] + [(axis, 2) for axis in column_axes]
    splitting = {*row_axes, *column_axes}
    copies = tuple(axis for axis in sizes if sizes[axis] > 1 and axis not in splitting)
    num_copies = prod(sizes[axis] for axis in copies)
    holders = num_copies * prod(sizes[axis] for axis, _ in exchanges)

    # Zero matrices fill up the stack, so that all devices get equally many.
    stack = jnp.pad(parts, ((0, -len(parts) % holders), (0, 0), (0, 0)))
    for axis, dimension in exchanges:
        stack = jax.lax.all_to_all(stack, axis, 0, dimension, tiled=True)
    if copies:  # several devices hold the same matrices, and each takes its share of them
        share = len(stack) // num_copies
        stack = jax.lax.dynamic_slice_in_dim(stack, jax.lax.axis_index(copies) * share, share)
    stack = function(stack)
    if copies:
        stack = jax.lax.all_gather(stack, copies, tiled=True)
    for axis, dimension in reversed(exchanges):
        stack = jax.lax.all_to_all(stack, axis, dimension, 0, tiled=True)
    return stack[: len(parts)]
