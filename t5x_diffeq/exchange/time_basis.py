"""Time embeddings with given values at the nodes of N steps.

For T >= N, the values are as well conditioned a basis as possible.

    e(t) = Linear2(SiLU(Linear1(gamma(t)))),   gamma(t) = [t, sin(pi t), cos(pi t)]

Linear1 reads only t: SiLU(c (t - t_k)) is a ramp that begins at t_k, and ramps that begin at the
nodes span functions that are almost linear between them. Of the functions in that span which are 1
at one node and 0 at the others, Linear2 mixes those that change least (|d/dt|^2 integrated over
[0, 1]): with them W(t) goes almost straight from node to node. It mixes them by the discrete cosine
transform, so that the e(t_n) are rows of an orthogonal matrix, at unit scale, and the first entry
of e is constant. The remaining entries of e, up to T, are functions that vanish at all nodes.

Sinusoids of 1000 t, with random linears, would be noise between the nodes; the values of slow ones,
of 10 t, at 24 nodes are nearly linearly dependent (condition number 1e9).

For T < N, T ramps can't take N given values each. There the values are given, and sinusoids up to
half a period per step, `smooth_frequencies`, have enough functions for them: Linear1 mixes them
into the inverse of SiLU at these values plus a constant, and Linear2 subtracts the constant. Of all
such mixtures it takes that which changes least.
"""

from math import pi
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.fft import idct
from scipy.special import lambertw

from t5x_diffeq.ode.schemes import grid
from t5x_diffeq.ode.time_embedding import TimeEmbedding
from t5x_diffeq.ode.time_features import time_features
from t5x_diffeq.runtime.errors import InputError

FREQUENCIES = 1  # S; the sinusoids' rows of Linear1 are zero until they are trained
TIME_SCALE = pi
_SHARPNESS = 4.0  # of a ramp's bend, which takes about 1/4 of the interval between two nodes
_FINE = 32  # points per node at which the change is measured
_LEAST_HIDDEN = 1.0  # of SiLU's outputs at the nodes, where it is almost linear
_RIDGE = 0.1  # on Linear1's entries, which keeps them small where several mixtures change as much
_WORST_CONDITION = 1e5  # times the rounding of float32, 6e-8, is 6e-3 of the weights

Matrix = Float[np.ndarray, "_ _"]


class TimeBasis(NamedTuple):
    """A time embedding and its values at the nodes.

    Attributes:
      parameters: parameters of the `TimeEmbedding`, float32.
      at_nodes: `[N, T]`, the values that the model computes from them in float32.
      mixed: condition number of the functions that Linear2 mixes, which amplifies rounding.
      condition: condition number of `at_nodes`.
    """

    parameters: dict[str, Float[np.ndarray, "..."]]
    at_nodes: Matrix
    mixed: float
    condition: float


def make_time_basis(num_nodes: int, width: int) -> TimeBasis:
    """The basis for the nodes of N steps.

    Args:
      num_nodes: number of nodes N.
      width: width T of the embedding, at least N.

    Raises:
      InputError: if the condition number is too large for float32.
    """
    centres = np.linspace(1 / num_nodes, 1, width)
    slope = _SHARPNESS * num_nodes
    nodes = np.arange(1, num_nodes + 1) / num_nodes
    fine = np.linspace(0, 1, _FINE * num_nodes + 1)
    mixing = _mixing_matrix(_ramps(nodes, centres, slope), _ramps(fine, centres, slope))
    hidden = np.zeros((2 * FREQUENCIES + 1, width))
    hidden[0] = slope
    parameters = {
        "hidden_kernel": hidden,
        "hidden_bias": -slope * centres,
        "output_kernel": mixing[:width],
        "output_bias": mixing[width],
    }
    parameters = {name: value.astype(np.float32) for name, value in parameters.items()}
    at_nodes = embed(parameters, num_nodes, FREQUENCIES, TIME_SCALE)
    mixed = float(np.linalg.cond(_ramps(nodes, centres, slope)))
    basis = TimeBasis(parameters, at_nodes, mixed, float(np.linalg.cond(at_nodes)))
    check_condition(basis)
    return basis


def check_condition(basis: TimeBasis) -> None:
    """Checks that rounding doesn't spoil the weights.

    Raises:
      InputError: if it does, naming the condition number.
    """
    worst = max(basis.mixed, basis.condition)
    if not worst < _WORST_CONDITION:
        raise InputError(
            f"the time embedding of {len(basis.at_nodes)} nodes has condition number {worst:.1e}, "
            f"and float32 takes at most {_WORST_CONDITION:.0e}; convert fewer layers"
        )


def _ramps(
    times: Float[np.ndarray, " _"], centres: Float[np.ndarray, " _"], slope: float
) -> Matrix:
    """The ramps SiLU(c (t - t_k)), and 1, as `[times, T + 1]`."""
    x = slope * (times[:, None] - centres)
    return np.column_stack((x / (1 + np.exp(-x)), np.ones(len(times))))


def _mixing_matrix(at_nodes: Matrix, at_fine: Matrix) -> Matrix:
    """Linear2 as a matrix `[T + 1, T]`, with its bias in the last row.

    Args:
      at_nodes: the ramps at the nodes, `[N, T + 1]`.
      at_fine: the ramps at many times.
    """
    num_nodes, width = len(at_nodes), at_nodes.shape[1] - 1
    vanishing = np.linalg.svd(at_nodes)[2][num_nodes:].T  # zero at all nodes
    cardinal = np.linalg.pinv(at_nodes)  # 1 at one node, 0 at the others
    change = np.diff(at_fine, axis=0)
    cardinal -= vanishing @ np.linalg.lstsq(change @ vanishing, change @ cardinal, rcond=None)[0]
    free = vanishing[:, : width - num_nodes]
    free = free / np.sqrt(np.square(at_fine @ free).mean(0))
    cosines = idct(np.eye(num_nodes), axis=0, norm="ortho")  # its first column is constant
    return np.hstack((np.sqrt(width) * cardinal @ cosines, free))


def smooth_frequencies(num_nodes: int) -> tuple[int, float]:
    """S and the factor on t for `smooth_time_embedding`.

    The fastest sinusoid has half a period per step, and near it neighbours differ by less than
    2 pi, so that there are as many independent functions as nodes.
    """
    return 5 * num_nodes, pi * num_nodes


def smooth_time_embedding(
    values: Float[np.ndarray, "N T"], num_frequencies: int, time_scale: float
) -> tuple[dict[str, Float[np.ndarray, "..."]], Matrix]:
    """A time embedding that has these values at the nodes, and its values there in float32.

    Args:
      values: the values at the nodes, about 1 in size.
      num_frequencies: S.
      time_scale: the factor on t; both as `smooth_frequencies` gives them.
    """
    num_nodes, width = values.shape

    def features(times: Float[np.ndarray, " _"]) -> Matrix:
        of_times = time_features(jnp.asarray(times), num_frequencies, time_scale)
        return np.column_stack((np.asarray(of_times, np.float64), np.ones(len(times))))

    constants = _LEAST_HIDDEN - values.min(0)
    wanted = _inverse_silu(values + constants)
    at_nodes = features(np.arange(1, num_nodes + 1) / num_nodes)
    change = np.diff(features(np.linspace(0, 1, _FINE * num_nodes + 1)), axis=0) * len(values)
    penalty = change.T @ change + _RIDGE * np.eye(change.shape[1])
    responses = np.linalg.solve(penalty, at_nodes.T)
    mixing = responses @ np.linalg.solve(at_nodes @ responses, wanted)
    parameters = {
        "hidden_kernel": mixing[:-1],
        "hidden_bias": mixing[-1],
        "output_kernel": np.eye(width),
        "output_bias": -constants,
    }
    parameters = {name: value.astype(np.float32) for name, value in parameters.items()}
    return parameters, embed(parameters, num_nodes, num_frequencies, time_scale)


def _inverse_silu(x: Matrix) -> Matrix:
    """z > 0 with z / (1 + exp(-z)) = x, for x > 0."""
    return x + lambertw(x * np.exp(-x)).real


def embed(
    parameters: dict[str, Float[np.ndarray, "..."]],
    num_nodes: int,
    num_frequencies: int,
    time_scale: float,
) -> Matrix:
    """e(t) at the nodes of N Lie-Trotter steps, as the model computes it: `[N, T]`."""
    times = jnp.asarray(grid("lie_trotter", num_nodes).reshape(-1))
    features = time_features(times, num_frequencies, time_scale)
    embedding = TimeEmbedding(parameters["output_bias"].size)
    variables = {"params": {name: jnp.asarray(value) for name, value in parameters.items()}}
    return np.asarray(embedding.apply(variables, features), np.float64)
