"""Spikes: steps whose loss or gradient norm lies far above the values of the steps before.

A value x is a spike if it is more than k robust deviations above the median m of a window of steps,

    x - m > k max(1.4826 MAD, 0.01 |m|),   MAD = median |x_i - m|

For normal noise, 1.4826 MAD is the standard deviation. Unlike mean and variance, neither median
moves much because of the spikes themselves, so spikes enter the window like all values. If the loss
rises for good, the new level is accepted after half a window, and training goes on. The second term
is for windows that hardly vary. A value that isn't finite is always a spike.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

_LEAST_SCALE = 0.01  # the least scale, relative to the median


@struct.dataclass
class RecentSteps:
    """The loss and gradient norm of the last steps; also a tree of its shapes or shardings."""

    values: Any  # `[2, window]`, by step modulo the window's length; NaN where there is none
    spikes: Any  # how many spikes the run has had, an int32 scalar

    @classmethod
    def new(cls, window: int) -> "RecentSteps":
        """The window of a run that has taken no step."""
        return cls(jnp.full((2, window), jnp.nan, jnp.float32), jnp.zeros((), jnp.int32))


def look_for_spike(
    recent: RecentSteps | None,
    step: Int[Array, ""],
    loss: Float[Array, ""],
    norm: Float[Array, ""],
    targets: Float[Array, ""],
    k: float,
) -> tuple[Bool[Array, ""], RecentSteps | None, dict[str, Array]]:
    """Whether a step is a spike, the recent steps after it, and what is reported of spikes.

    Without recent steps, only a value that isn't finite is a spike. `targets` is the number of
    tokens with a loss: if it is 0, the step leaves no value in the window, because its loss and
    norm are 0 and say nothing.
    """
    new = jnp.stack([loss, norm])
    finite = jnp.isfinite(new)
    if recent is None:
        return ~jnp.all(finite), None, {}
    is_spike = jnp.any(_far_above(recent.values, new, k)) | ~jnp.all(finite)
    slot = step % recent.values.shape[1]
    values = recent.values.at[:, slot].set(jnp.where(finite & (targets > 0), new, jnp.nan))
    recent = RecentSteps(values, recent.spikes + is_spike)
    return is_spike, recent, {"spike": is_spike, "spikes": recent.spikes}


def _far_above(
    values: Float[Array, "2 window"], new: Float[Array, "2"], k: float
) -> Bool[Array, "2"]:
    """Whether each new value is a spike; until the window is half full, no value is."""
    median = jnp.nanmedian(values, axis=1)
    mad = jnp.nanmedian(jnp.abs(values - median[:, None]), axis=1)
    scale = jnp.maximum(1.4826 * mad, _LEAST_SCALE * jnp.abs(median))
    is_known = 2 * jnp.isfinite(values).sum(axis=1) >= values.shape[1]
    return is_known & (new - median > k * scale)
