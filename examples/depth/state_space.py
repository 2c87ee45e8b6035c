"""A state-space hypernetwork: e(t) is the output of damped oscillators that start at t = 0.

    --config.model.time_basis='examples.depth.state_space:StateSpace(8)'

W(t) = W0 + P e(t) with e = C x and dx/dt = A x, where A is diagonal and complex with the
eigenvalues -1/2 + i pi k, as S4D-Lin begins (arXiv 2206.11893). A stays as it is, and C and P are
learned, so this is a time basis of K functions: the real parts of x(t) from k = 0, and the
imaginary parts from k = 1 (at k = 0 it is zero).
"""

from dataclasses import dataclass

import jax.numpy as jnp

import t5x_diffeq as td


@dataclass(frozen=True)
class StateSpace(td.TimeBasis):
    """exp(-t / 2) cos(pi k t) and exp(-t / 2) sin(pi (k + 1) t) for k = 0..K/2 - 1."""

    count: int  # K

    def __call__(self, times):
        """The functions at each time: `[times, K]`."""
        t = times.astype(jnp.float32)[:, None]
        frequencies = jnp.pi * jnp.arange(self.count // 2, dtype=jnp.float32)
        waves = (jnp.cos(frequencies * t), jnp.sin((frequencies + jnp.pi) * t))
        return jnp.exp(-t / 2) * jnp.concatenate(waves, axis=-1)
