"""Time bases: the functions gamma(t) from which e(t) is computed (`model.time_basis`).

    sinusoids     t, sin(c t w_j), cos(c t w_j)      w_j = 10000^(-j/S): the paper's, section 4.2
    legendre:K    P_0(x), ..., P_(K-1)(x)            x = 2 t - 1
    table:K       K hats at 1/K, 2/K, ..., 1         1 at its own knot, 0 at the others, straight
                                                     lines between; constant before 1/K

With c = 1000 the sinusoids turn many times within a solver step, so W(t) is noise between the nodes
of the trained grid. The other bases vary over times of about 1/K. They are functions on [0, 1]
whatever the grid: `table:K` has a row of e for each node of Euler's grid of K steps, and any other
grid interpolates between these rows.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from math import isfinite, sqrt
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from t5x_diffeq.config.config import ModelKeys
from t5x_diffeq.config.plugins import is_plugin, make_plugin
from t5x_diffeq.model.layers.array_types import Times
from t5x_diffeq.system.errors import InputError, describe_foreign

Features = Float[Array, "nodes features"]
_SAMPLES = 1000  # samples of t, for means over [0, 1]


class TimeBasis:
    """Functions gamma(t) on [0, 1]. A subclass needs `count` and `__call__`; the rest has defaults.

    A config names a basis of another package by `model.time_basis="package.module:Name(9)"`, with
    the arguments of the subclass (`docs/extending.md`).
    """

    count: int  # the number of functions
    # whether all functions are polynomials of t, of degree count - 1 at most
    polynomial: ClassVar[bool] = False
    # whether e(t) is a linear function of gamma(t); else two linear layers make it, as in the paper
    linear: ClassVar[bool] = True
    # whether the functions oscillate between the nodes or have kinks at the nodes, so that their
    # values at the nodes don't determine their values between the nodes
    rough: ClassVar[bool] = False

    def __call__(self, times: Times) -> Features:
        """The functions at each time, as float32 whatever the model's dtype."""
        raise NotImplementedError

    @property
    def mean_square(self) -> float:
        """The sum of the squared functions, averaged over t."""
        return float(np.square(self._sampled()).sum(-1).mean())

    @property
    def mean_sum(self) -> float:
        """The sum of the functions' absolute values, averaged over t, or an upper bound of it."""
        return float(np.abs(self._sampled()).sum(-1).mean())

    def is_smooth(self, num_nodes: int) -> bool:
        """Whether the values at so many nodes determine the functions between the nodes."""
        return not self.rough and self.count <= num_nodes

    def _sampled(self) -> Float[np.ndarray, "times features"]:
        return _values(self, (np.arange(_SAMPLES) + 0.5) / _SAMPLES)


@dataclass(frozen=True)
class Sinusoids(TimeBasis):
    """[t, sin(c t w), cos(c t w)], w_j = 10000^(-j/S)."""

    num_frequencies: int = 64  # S
    time_scale: float = 1000.0  # c, 1000 in the paper; in bfloat16, 1000 t would be noise
    count: int = field(init=False)  # 2 S + 1

    linear: ClassVar[bool] = False
    rough: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", 2 * self.num_frequencies + 1)

    def __call__(self, times: Times) -> Features:
        """The features of each time."""
        t, S = times.astype(jnp.float32)[:, None], self.num_frequencies
        w = 10_000.0 ** (-jnp.arange(S, dtype=jnp.float32) / S)
        turns = self.time_scale * t * w
        return jnp.concatenate((t, jnp.sin(turns), jnp.cos(turns)), axis=-1)

    @property
    def mean_square(self) -> float:
        """S, as sin^2 + cos^2 = 1; t itself is left out."""
        return float(self.num_frequencies)

    @property
    def mean_sum(self) -> float:
        """An upper bound, by Cauchy and Schwarz."""
        return sqrt(self.count * self.mean_square)


@dataclass(frozen=True)
class Legendre(TimeBasis):
    """P_0, ..., P_(K-1) of 2 t - 1."""

    count: int

    polynomial: ClassVar[bool] = True

    def __call__(self, times: Times) -> Features:
        """The polynomials at each time, by (k + 1) P_(k+1) = (2k + 1) x P_k - k P_(k-1)."""
        x = 2 * times.astype(jnp.float32) - 1
        P = [jnp.ones_like(x), x]
        for k in range(1, self.count - 1):
            P.append(((2 * k + 1) * x * P[k] - k * P[k - 1]) / (k + 1))
        return jnp.stack(P[: self.count], axis=-1)

    @property
    def mean_square(self) -> float:
        """The sum of 1 / (2 k + 1), the mean of P_k^2."""
        return float((1 / (2 * np.arange(self.count) + 1)).sum())

    @property
    def mean_sum(self) -> float:
        """An upper bound, by Cauchy and Schwarz."""
        return sqrt(self.count * self.mean_square)


@dataclass(frozen=True)
class Table(TimeBasis):
    """Hats, which interpolate K values at 1/K, 2/K, ..., 1 by straight lines."""

    count: int

    rough: ClassVar[bool] = True  # e(t) has a kink at each node of the trained grid

    def __call__(self, times: Times) -> Features:
        """The hats at each time."""
        K = self.count
        x = jnp.clip(times.astype(jnp.float32) * K - 1, 0, K - 1)[:, None]
        return jnp.maximum(1 - jnp.abs(x - jnp.arange(K)), 0)

    @property
    def mean_square(self) -> float:
        """1: not the mean over t, but the value at every knot, where a single hat is 1."""
        return 1.0

    @property
    def mean_sum(self) -> float:
        """1, the sum of the hats at any t."""
        return 1.0


def _values(basis: TimeBasis, times: np.ndarray) -> np.ndarray:
    """The functions at these times as NumPy's numbers, even if the caller is being traced.

    JAX's trace and mesh belong to a thread. Another thread computes outside of the trace, and not
    on the caller's mesh, whose devices may not be on this machine.
    """
    with ThreadPoolExecutor(1) as thread:
        compute = thread.submit(lambda: np.asarray(basis(jnp.asarray(times, jnp.float32))))
        return compute.result()


TIME_BASES: dict[str, Callable[[ModelKeys, int], TimeBasis]] = {  # functions of the config and k
    "sinusoids": lambda config, _: Sinusoids(config.num_frequencies, config.time_scale),
    "legendre:k": lambda _, k: Legendre(k),
    "table:k": lambda _, k: Table(k),
}


def make_time_basis(config: ModelKeys) -> TimeBasis:
    """The basis that `model.time_basis` names; an InputError if another package's is invalid."""
    name = config.time_basis
    if is_plugin(name):
        return _load_basis(name)
    kind, colon, count = name.partition(":")
    return TIME_BASES[f"{kind}:k" if colon else kind](config, int(count or 0))


@cache
def _load_basis(name: str) -> TimeBasis:
    basis = make_plugin("model.time_basis", name, TimeBasis)
    _check_features(name, basis)
    return basis


def _check_features(name: str, basis: TimeBasis) -> None:
    times = np.linspace(0, 1, 5, dtype=np.float32)
    try:
        features, count = _values(basis, times), basis.count
    except Exception as error:  # another package's code may raise anything
        raise InputError(
            f"model.time_basis={name} can't be evaluated: {describe_foreign(error)}"
        ) from error
    if features.shape != (len(times), count) or features.dtype != np.float32:
        raise InputError(
            f"model.time_basis={name} says that it has count={count} functions, but gives "
            f"{features.dtype}{list(features.shape)} for {len(times)} times; it must give "
            f"float32[{len(times)}, {count}]"
        )
    if not np.array_equal(features, _values(basis, times), equal_nan=True):
        raise InputError(
            f"model.time_basis={name} gives other values each time; it must be a function of t"
        )
    if basis.polynomial and not _are_polynomials(basis):
        raise InputError(
            f"model.time_basis={name} says polynomial=True, and its {count} functions aren't "
            f"polynomials of degree {count - 1} at most; leave polynomial out"
        )
    if not np.isfinite(features).all() or not features.any():
        raise InputError(
            f"model.time_basis={name} is {'zero' if np.isfinite(features).all() else 'not finite'} "
            "at t in [0, 1], so W(t) can't depend on it"
        )
    if not (isfinite(basis.mean_square) and basis.mean_square > 0):
        raise InputError(
            f"model.time_basis={name} says mean_square={basis.mean_square!r}; it is the mean of "
            "the squares of its functions, a number above 0"
        )


def _are_polynomials(basis: TimeBasis) -> bool:
    """Whether polynomials of degree `basis.count - 1` equal the functions, up to rounding."""
    times = (1 - np.cos(np.linspace(0, np.pi, 4 * basis.count + 1, dtype=np.float32))) / 2
    features = _values(basis, times)
    fit = np.polynomial.legendre.legfit(2 * times - 1, features, basis.count - 1)
    values = np.polynomial.legendre.legval(2 * times - 1, fit).T
    return bool(np.abs(values - features).max() <= 1e-3 * np.abs(features).max())
