"""Rotary position embedding (Su et al. 2021), half-rotation form.

`SCALINGS` has the ways of stretching the frequencies for sequences that are longer than in the
first training: position interpolation (Chen et al. 2023), Llama 3's, and YaRN (Peng et al. 2023).
The tables are computed in float32, in the order of operations of the library transformers, so that
angles of some thousand radians are the same.
"""

from collections.abc import Callable
from functools import cache
from math import ceil, floor, log, pi

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.array_types import Positions
from t5x_diffeq.system.errors import InputError

BASE = 10_000.0
Scaling = tuple[str | float, ...]  # a name of `SCALINGS` and its numbers, or ()
Frequencies = Float[np.ndarray, " _"]


def rotate(
    x: Float[Array, "B L H G"],
    positions: Positions,
    base: float = BASE,
    scaling: Scaling = (),
    dtype: DTypeLike | None = None,
    swap_by_product: bool = False,
) -> Float[Array, "B L H G"]:
    """Rotates the pairs (x[i], x[i + G/2]) of each head by `position * frequency[i]` radians.

    Args:
      dtype: dtype of the result; None: the dtype of x. The rotation is computed in float32.
      swap_by_product: whether a product with a permutation swaps the halves of a head. It is exact,
        and faster on TPUs, where arrays of half a head fill only half of each vector register.
    """
    frequencies, factor = rotary_table(x.shape[-1], base, scaling)
    # In float32: bfloat16 doesn't have all whole numbers beyond 256.
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    dtype = x.dtype if dtype is None else dtype
    if swap_by_product:
        cos, sin = jnp.concatenate((cos, cos), -1), jnp.concatenate((-sin, sin), -1)
        return (x.astype(jnp.float32) * cos + _swap_halves(x) * sin).astype(dtype)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(dtype)


def _swap_halves(x: Float[Array, "B L H G"]) -> Float[Array, "B L H G"]:
    """(x[G/2:], x[:G/2]) of each head in float32, exactly, as a product with a permutation.

    If x is bfloat16, its gradient is rounded to bfloat16, as in the products around it.
    """
    width = x.shape[-1]
    swap = np.roll(np.eye(width), width // 2, axis=1)
    return jnp.einsum(
        "blhg,gk->blhk",
        x,
        jnp.asarray(swap, x.dtype),
        precision=None if x.dtype == jnp.bfloat16 else "highest",
        preferred_element_type=jnp.float32,
    )


@cache
def rotary_table(width: int, base: float, scaling: Scaling) -> tuple[Frequencies, float]:
    """The frequencies `[G/2]` in radians per token, and the factor on cosines and sines."""
    exponents = (np.arange(0, width, 2) / np.float32(width)).astype(np.float32)
    if (base, scaling) == (BASE, ()):
        # Runs from before the base was a key were trained with this rounding.
        return (BASE ** -exponents.astype(np.float64)).astype(np.float32), 1.0
    frequencies = 1 / (float(base) ** exponents.astype(np.float64)).astype(np.float32)
    if not scaling:
        return frequencies, 1.0
    scale, _ = SCALINGS[str(scaling[0])]
    return scale(frequencies, base, *map(float, scaling[1:]))


def _scale_linear(frequencies: Frequencies, base: float, factor: float) -> tuple:
    return frequencies / np.float32(factor), 1.0


def _scale_llama3(
    frequencies: Frequencies, base: float, factor: float, low: float, high: float, length: float
) -> tuple[Frequencies, float]:
    """Divides frequencies of fewer than `low` turns in `length` tokens by the factor.

    Frequencies of more than `high` turns stay; between the two, the result is interpolated.
    """
    wavelengths = np.float32(2 * pi) / frequencies
    divided = frequencies / np.float32(factor)
    share = (np.float32(length) / wavelengths - np.float32(low)) / np.float32(high - low)
    between = (1 - share) * frequencies / np.float32(factor) + share * frequencies
    scaled = np.where(wavelengths > length / low, divided, frequencies)
    medium = (wavelengths >= length / high) & (wavelengths <= length / low)
    return np.where(medium, between, scaled).astype(np.float32), 1.0


def _scale_yarn(
    frequencies: Frequencies,
    base: float,
    factor: float,
    fast: float,
    slow: float,
    length: float,
    attention_factor: float,
) -> tuple[Frequencies, float]:
    """Divides frequencies of fewer than `slow` turns in `length` tokens by the factor.

    Frequencies of more than `fast` turns stay; between the two, the result is interpolated.
    """
    width = 2 * len(frequencies)

    def index(turns: float) -> float:
        """The index, not a whole number, of the frequency that makes so many turns."""
        return width * log(length / (turns * 2 * pi)) / (2 * log(base))

    first, last = max(floor(index(fast)), 0), min(ceil(index(slow)), width - 1)
    span = np.float32(last - first if last != first else 0.001)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - np.float32(first)) / span, 0, 1)
    kept = 1 - ramp
    divided = np.float32(1) / (np.float32(factor) * (np.float32(1) / frequencies))
    return (divided * (1 - kept) + frequencies * kept).astype(np.float32), attention_factor


# By name: the function, and the names of its numbers.
SCALINGS: dict[str, tuple[Callable[..., tuple[Frequencies, float]], tuple[str, ...]]] = {
    "linear": (_scale_linear, ("factor",)),
    "llama3": (
        _scale_llama3,
        ("factor", "low_freq_factor", "high_freq_factor", "original_length"),
    ),
    "yarn": (
        _scale_yarn,
        ("factor", "beta_fast", "beta_slow", "original_length", "attention_factor"),
    ),
}


def check_scaling(scaling: Scaling) -> None:
    """Raises an InputError unless a `model.rope_scaling` is () or a scaling with its numbers."""
    if not scaling:
        return
    name = scaling[0]
    if name not in SCALINGS:
        raise InputError(
            f"model.rope_scaling={scaling!r}: the first entry can be {', '.join(SCALINGS)}"
        )
    _, names = SCALINGS[str(name)]
    numbers = [x for x in scaling[1:] if isinstance(x, int | float) and 0 < x < float("inf")]
    if not len(numbers) == len(names) == len(scaling) - 1:
        raise InputError(
            f"model.rope_scaling={scaling!r}: {name} takes {len(names)} numbers greater than 0: "
            f"{', '.join(names)}"
        )
    if name == "llama3" and not numbers[1] < numbers[2]:
        raise InputError(
            f"model.rope_scaling={scaling!r}: low_freq_factor must be less than high_freq_factor"
        )
