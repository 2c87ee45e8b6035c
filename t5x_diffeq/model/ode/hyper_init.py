"""Time embeddings e(t), and the hypernetwork's initial scales and step multipliers (`model.init`).

There are S frequencies and an embedding of width T; s = 0.5 / sqrt(fan_in) is the standard
deviation of W(t) at initialisation:

    parameter               init="paper"      init="invariant"       multiplier ("invariant")
    Linear1 kernel          N(0, 0.02^2)      N(0, 1 / S)            1 / 2
    Linear2 kernel          N(0, 0.02^2)      N(0, 1 / (0.36 T))     5 / (2 T)
    C of a linear e(t)      N(0, 0.02^2)      N(0, 1 / |gamma|^2)    1 / |gamma|_1
    P of a kernel           N(0, 0.02^2)      N(0, s^2 / T)          1 / (2 T)
    P of a bias             N(0, 1e-4^2)      0                      1 / (2 T)
    P of a norm             0                 0                      1 / (2 T)
    W0, biases of Linears   0                 0                      1 / 2

Under "invariant" the output of Linear1 has unit variance, and so has e(t); 0.36 is the second
moment of SiLU of a standard normal. Adam moves every entry of P by about the learning rate,
whatever the gradient, and so moves W(t) by lr * multiplier * sum_k |e_k(t)|. This sum grows with T.
Dividing by T keeps the update of W(t) the same for every T, as muP (Yang et al. 2022) keeps updates
the same for every width. W(t) then moves by about the learning rate, half through W0 and half
through P, as the weights of a layer do, so a learning rate that suits the baseline suits the ODE.
Alternatives that were tried are in docs/lab/settings.md.

A linear e(t) = C^T gamma(t) (`time_basis`) has unit scale, too, and moves by the learning rate:
|gamma|^2 and |gamma|_1 are the sums of the squared and of the absolute features of t, averaged over
t. In the first steps, W(t) then moves about half as far as with the two linears.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from t5x_diffeq.model.layers.parameter import Parameter, declare
from t5x_diffeq.model.ode.time_basis import TimeBasis


class TimeEmbedding(nn.Module):
    """e(t) = Linear2(SiLU(Linear1(gamma(t)))), in float32 (paper, section 4.2)."""

    width: int  # output width T of both linears
    hidden_std: float = 0.02  # standard deviation of Linear1's kernel at initialisation
    output_std: float = 0.02  # the same for Linear2's kernel
    # factor on the optimizer's step for Linear1's kernel and both biases
    step_multiplier: float = 1.0
    output_multiplier: float = 1.0  # the same for Linear2's kernel

    @nn.compact
    def __call__(self, features: Float[Array, "nodes features"]) -> Float[Array, "nodes T"]:
        """The embedding of each time."""
        hidden = self._linear("hidden", features, self.hidden_std, self.step_multiplier)
        return self._linear("output", jax.nn.silu(hidden), self.output_std, self.output_multiplier)

    def _linear(
        self, name: str, x: Float[Array, "nodes _"], std: float, kernel_multiplier: float
    ) -> Float[Array, "nodes T"]:
        """`x @ kernel + bias`; both are small, so they are replicated on every device."""
        kernel = declare(
            self,
            f"{name}_kernel",
            nn.initializers.normal(std),
            (x.shape[-1], self.width),
            (None, "time_embed"),
            "time_embedding",
            step_multiplier=kernel_multiplier,
        )
        bias = declare(
            self,
            f"{name}_bias",
            nn.initializers.zeros,
            (self.width,),
            ("time_embed",),
            "time_embedding",
            step_multiplier=self.step_multiplier,
        )
        # By default, a TPU would round the float32 operands to bfloat16.
        return jnp.dot(x, kernel, precision="highest") + bias


class LinearTimeEmbedding(nn.Module):
    """e(t) = C^T gamma(t), in float32: a row of C for each feature.

    If the features are the hats of `table:K`, the rows are the values of e at their knots.
    """

    width: int
    std: float = 0.02  # standard deviation of C at initialisation
    step_multiplier: float = 1.0  # factor on the optimizer's step for C

    @nn.compact
    def __call__(self, features: Float[Array, "nodes features"]) -> Float[Array, "nodes T"]:
        """The embedding of each time."""
        C = declare(
            self,
            "coefficients",
            nn.initializers.normal(self.std),
            (features.shape[-1], self.width),
            (None, "time_embed"),
            "time_embedding",
            step_multiplier=self.step_multiplier,
        )
        return jnp.dot(features, C, precision="highest")


_SILU_SECOND_MOMENT = 0.36


@dataclass(frozen=True)
class HyperInit:
    """Scales and step multipliers of the hypernetwork: one column of the table above."""

    init: str  # "paper" or "invariant"
    T: int
    basis: TimeBasis  # the functions of time that the time embedding reads

    @property
    def single(self) -> float:
        """Factor on the optimizer's step for W0, Linear1 and biases, which aren't summed over T."""
        return 1.0 if self.init == "paper" else 1 / 2

    @property
    def summed(self) -> float:
        """Factor on the optimizer's step for P, which makes W(t) as a sum of T kernels."""
        return 1.0 if self.init == "paper" else 1 / (2 * self.T)

    def std(self, leaf: Parameter) -> float:
        """Standard deviation of the P that makes `leaf`."""
        if leaf.role == "kernel":
            return 0.02 if self.init == "paper" else 0.5 / sqrt(leaf.fan_in * self.T)
        return 1e-4 if self.init == "paper" and leaf.role == "bias" else 0.0

    def embedding(self, **module: Any) -> TimeEmbedding | LinearTimeEmbedding:
        """A time embedding at these scales; `module` holds Linen's own arguments."""
        module = {"width": self.T, "name": "time_embedding", **module}
        if self.basis.linear:
            if self.init == "paper":
                return LinearTimeEmbedding(**module)
            std, multiplier = sqrt(1 / self.basis.mean_square), 1 / self.basis.mean_sum
            return LinearTimeEmbedding(std=std, step_multiplier=multiplier, **module)
        if self.init == "paper":
            return TimeEmbedding(**module)
        return TimeEmbedding(
            hidden_std=sqrt(1 / self.basis.mean_square),
            output_std=sqrt(1 / (_SILU_SECOND_MOMENT * self.T)),
            step_multiplier=self.single,
            output_multiplier=5 * self.summed,
            **module,
        )

    @property
    def embedding_products(self) -> int:
        """Multiply-adds of e(t) at one time."""
        return self.T * self.basis.count + (0 if self.basis.linear else self.T * self.T)
