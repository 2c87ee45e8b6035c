"""A neural ODE transformer whose W(t) is a polynomial of t, in PyTorch.

    W(t) = sum over k < K of Q_k P_k(2 t - 1)         P_k: Legendre's polynomials

The tensors are Q_0 .. Q_(K-1) of every weight, so the number N of steps is free:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True, num_steps=24)

Each forward pass makes W(t_n), t_n = (n + node) / N, for n = 0 .. N-1, and takes the steps of
`modeling_diffeq.py`, of size dt = span / N. `generate` makes W(t_n) once for all its tokens.
This file lies beside the weights, with `modeling_diffeq.py`.

Licensed under Apache-2.0.
"""

from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from .modeling_diffeq import DiffEqConfig, DiffEqForCausalLM, DiffEqModel


class HypernetworkConfig(DiffEqConfig):
    """The sizes of one step, and what makes its weights.

    Attributes:
      num_polynomials: K.
      span: N dt, the length of the solver's interval.
      node: where a step reads its weights, as a part of the step.
      scaled_by_step: the weights of a step that write to the residual stream, and so are
        multiplied by dt.
    """

    model_type = "t5x_diffeq_hypernetwork"
    attribute_map = {"num_steps": "num_hidden_layers"}  # noqa: RUF012

    def __init__(self, num_polynomials=1, span=1.0, node=0.0, scaled_by_step=(), **kwargs):
        self.num_polynomials, self.span, self.node = num_polynomials, span, node
        self.scaled_by_step = list(scaled_by_step)
        super().__init__(**kwargs)


class HypernetworkModel(DiffEqModel):
    """Steps that share one module: `steps[k]` holds Q_k, and the k-th is never called itself."""

    config_class = HypernetworkConfig
    supports_gradient_checkpointing = False  # a recomputed step would have lost its weights
    _supports_attention_backend = False  # serving engines look for a module per step

    def __init__(self, config: HypernetworkConfig):
        super().__init__(config)
        self.keeps = False  # whether W(t_n) is kept between calls, while nothing changes Q_k
        self.kept: list[dict[str, Tensor]] | None = None

    def num_modules(self) -> int:
        """K."""
        return self.config.num_polynomials

    def every_step(self):
        """The steps of the grid, in order."""
        for n, weights in enumerate(self.weights_of_steps()):
            yield partial(self.call_step, n, weights)

    def call_step(self, n: int, weights: dict, y: Tensor, **attending) -> Tensor:
        """The state after step n."""
        frame = self.steps[0]
        frame.attention.layer_idx = n
        return functional_call(frame, weights, (y,), attending)

    def weights_of_steps(self) -> list[dict[str, Tensor]]:
        """W(t_n) of each step, by the names of the weights."""
        if not self.keeps or torch.is_grad_enabled():
            return self.make_weights()
        if self.kept is None:
            self.kept = self.make_weights()
        return self.kept

    def make_weights(self) -> list[dict[str, Tensor]]:
        """W(t_0) .. W(t_(N-1)), computed in float32 and rounded to the dtype of Q_k."""
        config, N = self.config, self.config.num_hidden_layers
        each = [dict(step.named_parameters()) for step in self.steps]
        times = (torch.arange(N, device=self.device) + config.node) / N
        features = legendre(times, config.num_polynomials)
        steps: list[dict[str, Tensor]] = [{} for _ in range(N)]
        for name, first in each[0].items():
            Q = torch.stack([layer[name] for layer in each]).float()
            W = torch.tensordot(features, Q, 1)
            W = W * (config.span / N) if name in config.scaled_by_step else W
            for layer, value in zip(steps, W.to(first.dtype), strict=True):
                layer[name] = value
        return steps


class HypernetworkForCausalLM(DiffEqForCausalLM):
    """`HypernetworkModel` with a head."""

    config_class = HypernetworkConfig
    model_class = HypernetworkModel
    supports_gradient_checkpointing = False
    _supports_attention_backend = False

    def generate(self, *args, **kwargs):
        """The library's `generate`, for which W(t_n) is made once.

        It isn't kept longer, because a Q_k can change unseen (`p.data.mul_(...)`).
        """
        self.model.keeps = True
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.model.keeps, self.model.kept = False, None


def legendre(times: Tensor, count: int) -> Tensor:
    """`[N, K]`: P_0 .. P_(K-1) of 2 t - 1, by (k + 1) P_(k+1) = (2k + 1) x P_k - k P_(k-1)."""
    x = 2 * times - 1
    P = [torch.ones_like(x), x]
    for k in range(1, count - 1):
        P.append(((2 * k + 1) * x * P[k] - k * P[k - 1]) / (k + 1))
    return torch.stack(P[:count], dim=-1)
