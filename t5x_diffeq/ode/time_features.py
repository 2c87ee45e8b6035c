"""The functions of time that a time embedding reads: `model.time_basis`.

    sinusoids     t, sin(c t w_j), cos(c t w_j)      w_j = 10000^(-j/S): the paper's, section 4.2
    legendre:K    P_0(x), ..., P_(K-1)(x)            x = 2 t - 1
    table:K       K hats at 1/K, 2/K, ..., 1         1 at its own knot, 0 at the others, straight
                                                     lines between; constant before 1/K

With c = 1000 the sinusoids turn many times within a solver step, so W(t) is noise between the nodes
of the trained grid. The others are smooth over 1/K. They are functions on [0, 1] whatever the grid:
`table:K` has a row of e for each node of Euler's grid of K steps, and any other grid reads between
these rows.
"""

from dataclasses import dataclass
from math import sqrt

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from t5x_diffeq.layers.array_types import Times

Features = Float[Array, "nodes features"]
SINUSOIDS = "sinusoids"


@dataclass(frozen=True)
class TimeFeatures:
    """gamma(t), as float32 whatever the model's dtype: 1000 t in bfloat16 is noise.

    Attributes:
      basis: "sinusoids", or another name above with its number K.
      num_frequencies: S, of sinusoids.
      time_scale: c, of sinusoids; 1000 in the paper.
    """

    basis: str = SINUSOIDS
    num_frequencies: int = 64
    time_scale: float = 1000.0

    def __call__(self, times: Times) -> Features:
        """The features of each time in [0, 1]."""
        t = times.astype(jnp.float32)
        if self.basis == SINUSOIDS:
            return time_features(t, self.num_frequencies, self.time_scale)
        return (legendre if self._kind == "legendre" else hats)(t, self.count)

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
        if self._kind == "legendre":
            return float((1 / (2 * np.arange(self.count) + 1)).sum())
        return 1.0 if self._kind == "table" else float(self.num_frequencies)  # sin^2 + cos^2 = 1

    @property
    def mean_sum(self) -> float:
        """The sum of the features' absolute values, averaged over t; of polynomials, a bound."""
        return 1.0 if self._kind == "table" else sqrt(self.count * self.mean_square)


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


def hats(times: Times, count: int) -> Features:
    """Piecewise linear functions that interpolate K values at 1/K, 2/K, ..., 1."""
    x = jnp.clip(times * count - 1, 0, count - 1)[:, None]
    return jnp.maximum(1 - jnp.abs(x - jnp.arange(count)), 0)
