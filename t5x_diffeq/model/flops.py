"""The FLOPs of an optimizer step, by formula, and the fraction of the peak FLOP/s that it reaches.

MFU, model FLOPs utilisation (Chowdhery et al. 2022, appendix B): the FLOPs that the model needs,
over the FLOPs that devices could do in the time. A multiply-add is two FLOPs; only matrix products
count; causal attention counts half of its square; embedding lookups are free; the head counts; the
backward pass is twice the forward pass. Recomputation is not a model FLOP, and neither is making
W(t), which the per-layer baseline doesn't need: both are listed separately.
"""

from dataclasses import dataclass
from functools import cache

import jax

from t5x_diffeq.model.block import SubFieldFlops
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import make_source
from t5x_diffeq.model.layers.attention_kernels import LANES, splash_block
from t5x_diffeq.model.layers.parameter import flatten_parameters
from t5x_diffeq.model.ode.integrate import kept_names
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.model.sub_fields import SchemeLeaves, block_of_shapes, need_methods
from t5x_diffeq.system.errors import InputError


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of an optimizer step on the whole batch, forward and backward."""

    projections: float  # products with f's weights: q, k, v and output of attention
    # what tokens compute with each other in f: scores and weighted sums of values, half of the
    # square
    attention: float
    mlp: float  # g, the MLP
    scheme: float  # products of the solver's step with kernels that the scheme declares
    head: float  # logits
    hypernetwork: float  # making W(t) from t, once per optimizer step; 0 for other weights
    recomputed: float  # recomputation in the backward pass, by `model.remat`
    # what a fused attention kernel computes: forward, recomputed and backward. It recomputes scores
    # itself, computes whole blocks where the mask cuts one, and pads narrow heads; `attention` has
    # only what the model needs.
    attention_kernels: float
    head_width: int  # the width of the heads, on which the speed of such a kernel depends

    @property
    def model(self) -> float:
        """What MFU counts: no hypernetwork and no recomputation."""
        return self.projections + self.attention + self.mlp + self.scheme + self.head

    @property
    def total(self) -> float:
        """Everything that is computed."""
        return self.model + self.hypernetwork + self.recomputed


@cache
def step_flops(config: ModelConfig, batch_size: int) -> StepFlops:
    """FLOPs of an optimizer step on `batch_size` sequences of `config.max_length` tokens."""
    need_methods(config, ("flops",))
    tokens = batch_size * config.max_length
    f, g = _evaluations(config)
    block = block_of_shapes(config)
    pair = block.flops(config.max_length)
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    if not is_pair or not all(isinstance(each, SubFieldFlops) for each in pair):
        raise InputError(
            f"model.block={config.block}: its method flops returns {pair!r:.60}; it must return "
            "two SubFieldFlops, of f and of g"
        )
    flops_f, flops_g = pair
    projections, attention = tokens * f * flops_f.products, tokens * f * flops_f.mixing
    mlp = tokens * g * (flops_g.products + flops_g.mixing)
    scheme = tokens * config.num_steps * _products_of_scheme(config)
    head = 2 * tokens * config.vocab_size * config.embed_dim
    return StepFlops(
        projections=3 * projections,
        attention=3 * attention,
        mlp=3 * mlp,
        scheme=3 * scheme,
        head=3 * head,
        hypernetwork=3 * make_source(config).flops(),
        recomputed=tokens * _recomputed_products(config, flops_f, flops_g)
        + scheme * _recomputes(config)
        + _recomputed_attention(config) * attention,
        attention_kernels=attention * _kernel_work(config)
        if block.has_attention_kernel and config.attention != "xla"
        else 0.0,
        head_width=config.head_width,
    )


def _evaluations(config: ModelConfig) -> tuple[int, int]:
    f, g = find_scheme(config.scheme).evaluations
    return config.num_steps * f, config.num_steps * g


def _products_of_scheme(config: ModelConfig) -> float:
    """FLOPs per token of a step's products with the kernels that its scheme declares."""
    variables = jax.eval_shape(SchemeLeaves(config, parent=None).init, jax.random.key(0))
    leaves = flatten_parameters(variables.get("params", {})).values()
    return sum(2.0 * leaf.value.size for leaf in leaves if leaf.role == "kernel")


def _recomputes(config: ModelConfig) -> bool:
    """Whether `model.remat` recomputes products without a name in the backward pass."""
    return config.remat not in ("none", "dots")


def _recomputed_products(
    config: ModelConfig, flops_f: SubFieldFlops, flops_g: SubFieldFlops
) -> float:
    """FLOPs per token of the products with weights that `model.remat` recomputes.

    The gradient doesn't need the result of a product that is added to the residual stream, unless
    the rest of the solver step reads it.
    """
    f, g = _evaluations(config)
    if not _recomputes(config):
        return 0
    kept = kept_names(config.remat) if config.remat.startswith("keep:") else ()
    layer = find_scheme(config.scheme).layer
    last_f = flops_f.last if layer == "parallel" else 0
    last_g = flops_g.last if layer is not None else 0
    stored_f, stored_g = (
        sum(flops.named.get(name, 0) for name in kept) for flops in (flops_f, flops_g)
    )
    return f * (flops_f.products - last_f - stored_f) + g * (flops_g.products - last_g - stored_g)


def _recomputed_attention(config: ModelConfig) -> int:
    """Whether `model.remat` recomputes scores and sums of values, as 0 or 1.

    Triton's kernel is recomputed even if its output is saved: the backward pass needs the softmax's
    sums, which are internal to the kernel.
    """
    kept = config.remat.startswith("keep:") and "attention" in kept_names(config.remat)
    keeps_sums = config.attention.startswith(("splash", "cudnn"))
    return 0 if config.remat == "none" or (kept and keeps_sums) else 1


def _kernel_work(config: ModelConfig) -> float:
    """FLOPs of a fused attention kernel in an optimizer step; 1 is what a forward pass needs."""
    recomputed = _recomputed_attention(config)
    if not config.attention.startswith("splash"):
        # Two products forward: scores, and sums of values. Five backward: two for the gradient of
        # each product, and the scores again. Triton computes dq and (dk, dv) in two kernels, each
        # of which computes the scores and their gradient.
        return 1 + recomputed + (7 if config.attention == "triton" else 5) / 2
    head_dim = config.head_width
    block = splash_block(config.attention, config.max_length, head_dim)
    widened = (head_dim + -head_dim % LANES) / head_dim
    # Of n blocks in a row of the mask, (n + 1) / 2 are visited on average; n / 2 are needed.
    visited = 1 + block / config.max_length
    return widened * visited * (1 + recomputed + 7 / 2)  # dq and (dk, dv) each compute the scores


def forward_flops(config: ModelConfig) -> float:
    """FLOPs per token of a forward pass over a whole sequence, without the FLOPs of making W(t)."""
    return step_flops(config, 1).model / 3 / config.max_length


def mfu(model_flops: float, seconds: float, num_devices: int, peak_flops: float) -> float:
    """Model FLOPs utilisation, as a fraction of 1.

    Args:
      model_flops: the FLOPs that the model needs (`StepFlops.model`), of the whole batch.
      seconds: how long they take.
      peak_flops: peak FLOP/s of a device (`chips.py`).
    """
    return model_flops / (seconds * num_devices * peak_flops)
