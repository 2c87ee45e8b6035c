"""The functions of time that a time embedding reads: `model.time_basis`.

    sinusoids     t, sin(c t w_j), cos(c t w_j)      w_j = 10000^(-j/S): the paper's, section 4.2
    legendre:K    P_0(x), ..., P_(K-1)(x)            x = 2 t - 1
    chebyshev:K   T_0(x), ..., T_(K-1)(x)
    splines:K     K cubic B-splines                  uniform knots in [0, 1] (de Boor 1978)
    table:K       K hats at 1/K, 2/K, ..., 1         1 at its own knot, 0 at the others, straight
                                                     lines between; constant before 1/K

With c = 1000 the sinusoids turn many times within a solver step, so W(t) is noise between the nodes
of the trained grid. The others are smooth over 1/K. They are functions on [0, 1] whatever the grid:
`table:K` has a row of e for each node of Euler's grid of K steps, and any other grid reads between
these rows.
"""

from dataclasses import dataclass
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Times
from t5x_diffeq.runtime.errors import InputError

Features = Float[Array, "nodes features"]
SINUSOIDS = "sinusoids"
_CUBIC = 3
_MEAN_SQUARE_OF_SPLINES = 0.48  # of the sum of squared cubic B-splines, away from the ends


@dataclass(frozen=True)
class TimeFeatures:
    """gamma(t), as float32 whatever the model's dtype: 1000 t in bfloat16 is noise.

    Attributes:
      basis: "sinusoids", or another name above with its number K.
      num_frequencies: S, of sinusoids.
      time_scale: c, of sinusoids; 1000 in the paper.

    Raises:
      InputError: if there are too few splines.
    """

    basis: str = SINUSOIDS
    num_frequencies: int = 64
    time_scale: float = 1000.0

    def __post_init__(self) -> None:
        if self._kind == "splines" and self.count <= _CUBIC:
            raise InputError(
                f"model.time_basis={self.basis}: cubic B-splines are at least {_CUBIC + 1}; give "
                f"splines:{_CUBIC + 1} or more, or take legendre:{self.count}"
            )

    def __call__(self, times: Times) -> Features:
        """The features of each time in [0, 1]."""
        t = times.astype(jnp.float32)
        if self.basis == SINUSOIDS:
            return time_features(t, self.num_frequencies, self.time_scale)
        of_kind = {"legendre": legendre, "chebyshev": chebyshev, "splines": splines, "table": hats}
        return of_kind[self._kind](t, self.count)

    @property
    def _kind(self) -> str:
        return self.basis.partition(":")[0]

    @property
    def count(self) -> int:
        """The number of features."""
        if self.basis == SINUSOIDS:
            return 2 * self.num_frequencies + 1
        return int(self.basis.partition(":")[2])

    @property
    def mean_square(self) -> float:
        """The sum of the squared features, averaged over t; of a table, at the knots."""
        k = np.arange(self.count)
        if self._kind == "legendre":
            return float((1 / (2 * k + 1)).sum())
        if self._kind == "chebyshev":
            return float((0.5 - 0.5 / (4 * k**2 - 1)).sum())
        of_others = {"splines": _MEAN_SQUARE_OF_SPLINES, "table": 1.0}
        return of_others.get(self._kind, float(self.num_frequencies))  # sin^2 + cos^2 = 1

    @property
    def mean_sum(self) -> float:
        """The sum of the features' absolute values, averaged over t; of polynomials, a bound."""
        return 1.0 if self._kind in ("splines", "table") else sqrt(self.count * self.mean_square)


def time_features(times: Times, num_frequencies: int, time_scale: float) -> Features:
    """gamma(t) = [t, sin(c t w), cos(c t w)], w_j = 10000^(-j/S); 2S + 1 features.

    Args:
      times: depth in [0, 1].
      num_frequencies: S.
      time_scale: c, 1000 in the paper.
    """
    t = times.astype(jnp.float32)[:, None]
    w = 10_000.0 ** (-jnp.arange(num_frequencies, dtype=jnp.float32) / num_frequencies)
    return jnp.concatenate((t, jnp.sin(time_scale * t * w), jnp.cos(time_scale * t * w)), axis=-1)


def legendre(times: Times, count: int) -> Features:
    """P_0 ... P_(K-1) of 2 t - 1, by (k + 1) P_(k+1) = (2k + 1) x P_k - k P_(k-1)."""
    x = 2 * times - 1
    P = [jnp.ones_like(x), x]
    for k in range(1, count - 1):
        P.append(((2 * k + 1) * x * P[k] - k * P[k - 1]) / (k + 1))
    return jnp.stack(P[:count], axis=-1)


def chebyshev(times: Times, count: int) -> Features:
    """T_0 ... T_(K-1) of 2 t - 1, by T_(k+1) = 2 x T_k - T_(k-1)."""
    x = 2 * times - 1
    T = [jnp.ones_like(x), x]
    for k in range(1, count - 1):
        T.append(2 * x * T[k] - T[k - 1])
    return jnp.stack(T[:count], axis=-1)


def splines(times: Times, count: int) -> Features:
    """Cubic B-splines on uniform knots, of which the first and last are fourfold.

    By the recursion of Cox and de Boor. At every time they sum to 1, and four of them aren't 0.
    """
    intervals = count - _CUBIC
    ends = np.zeros(_CUBIC), np.linspace(0, 1, intervals + 1), np.ones(_CUBIC)
    knots, t = np.concatenate(ends).astype(np.float32), times[:, None]
    own = jnp.clip(jnp.floor(times * intervals), 0, intervals - 1)  # the interval that holds t
    B = jax.nn.one_hot(own.astype(jnp.int32) + _CUBIC, count + _CUBIC)
    for degree in range(1, _CUBIC + 1):
        widths = knots[degree:] - knots[:-degree]
        rise = (t - knots[:-degree]) / np.where(widths > 0, widths, np.inf)
        B = rise[:, :-1] * B[:, :-1] + (1 - rise[:, 1:]) * B[:, 1:]
    return B


def hats(times: Times, count: int) -> Features:
    """Piecewise linear functions that interpolate K values at 1/K, 2/K, ..., 1."""
    x = jnp.clip(times * count - 1, 0, count - 1)[:, None]
    return jnp.maximum(1 - jnp.abs(x - jnp.arange(count)), 0)
