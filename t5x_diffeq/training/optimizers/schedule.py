"""The learning rate of each optimizer step: a warm-up, a peak, and a fall."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from t5x_diffeq.config.config import OptimizerKeys
from t5x_diffeq.system.errors import InputError


@struct.dataclass
class Schedule:
    """The numbers of a schedule, scalars; also a tree of their shapes or shardings.

    They are an input of the compiled train step. So runs that differ in their peak, their length or
    their warm-up share a program: a longer run, or another rate of a sweep, compiles no step.
    """

    peak: Any
    end_fraction: Any  # the part of the peak at which the fall ends
    warmup: Any  # the number of optimizer steps of the warm-up
    fall_start: Any  # the optimizer step at which the rate begins to fall
    fall_steps: Any  # how many optimizer steps the fall takes
    shape: str = struct.field(pytree_node=False)  # of the fall: a value of `optimizer.schedule`

    def __call__(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """The learning rate after so many optimizer steps."""
        rise = (step + 1) / (self.warmup + 1)
        x = jnp.clip((step - self.fall_start) / self.fall_steps, 0, 1)
        if self.shape == "cosine":
            x = (1 - jnp.cos(jnp.pi * x)) / 2
        fall = 1 - (1 - self.end_fraction) * x
        return self.peak * jnp.minimum(jnp.minimum(rise, 1), fall)


def learning_rate_schedule(optimizer: OptimizerKeys, total_steps: int) -> Schedule:
    """Linear warm-up to the peak, then what `optimizer.schedule` names.

    "cosine" falls by half a cosine to `end_lr_fraction` of the peak (Loshchilov and Hutter 2017).
    "wsd" (Haegele et al. 2024) stays at the peak until a linear cooldown to `end_lr_fraction` of
    it, by default over the last fifth of the run. Before the cooldown, only the warm-up depends on
    `total_steps`. So a run that branches off at the peak goes on at exactly that rate.

    Raises:
      InputError: if the schedule's keys contradict each other.
    """
    warmup, stated = round(optimizer.warmup_fraction * total_steps), optimizer.cooldown_steps
    if optimizer.schedule == "cosine":
        if stated is not None:
            raise InputError(
                f"optimizer.cooldown_steps is {stated}, but optimizer.schedule=cosine has no "
                "cooldown; leave the key out or set optimizer.schedule=wsd"
            )
        start, steps = warmup, max(total_steps - warmup, 1)
    else:
        cooldown = total_steps // 5 if stated is None else stated
        if warmup + cooldown > total_steps:
            raise InputError(
                f"{warmup} steps of warm-up (optimizer.warmup_fraction="
                f"{optimizer.warmup_fraction:g}) and {cooldown} of cooldown "
                f"(optimizer.cooldown_steps={stated}) are more than "
                f"train.total_steps={total_steps}; make one of the two shorter"
            )
        start, steps = total_steps - cooldown, max(cooldown, 1)
    return Schedule(
        peak=np.float32(optimizer.learning_rate),
        end_fraction=np.float32(optimizer.end_lr_fraction),
        warmup=np.int32(warmup),
        fall_start=np.int32(start),
        fall_steps=np.int32(steps),
        shape=optimizer.schedule,
    )
