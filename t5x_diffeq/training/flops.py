"""FLOPs of an optimizer step, by formula, and the fraction of the hardware's peak that it reaches.

MFU, model FLOPs utilisation (Chowdhery et al. 2022, appendix B): the FLOPs that the model needs,
over those that the devices could do in the time. A multiply-add is two FLOPs; only matrix products
count; causal attention counts half of its square; embedding lookups are free; the head counts; the
backward pass is twice the forward pass. Recomputation is not a model FLOP, and neither is making
W(t), which the per-layer baseline doesn't need: both are listed separately.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import prod

from t5x_diffeq.layers.attention_kernels import LANES, splash_blocks
from t5x_diffeq.layers.parameter import Parameter
from t5x_diffeq.models.block import Block
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.ode.integrate import kept_names
from t5x_diffeq.ode.solvers import SCHEMES
from t5x_diffeq.ode.weights import block_parameters


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of an optimizer step on the whole batch, forward and backward.

    Attributes:
      projections: q, k, v and output of attention.
      attention: scores and weighted sums of values, half of the square.
      mlp: the MLP.
      head: logits.
      hypernetwork: making W(t) from t, once per optimizer step; 0 for other weights.
      recomputed: recomputation in the backward pass, by `model.remat` and of the logits.
      attention_kernels: what a fused attention kernel computes: forward, recomputed and backward.
        It recomputes scores itself, computes whole blocks where the mask cuts one, and pads narrow
        heads; of all this, only what the model needs is counted above.
    """

    projections: float
    attention: float
    mlp: float
    head: float
    hypernetwork: float
    recomputed: float
    attention_kernels: float

    @property
    def model(self) -> float:
        """What MFU counts: no hypernetwork and no recomputation."""
        return self.projections + self.attention + self.mlp + self.head

    @property
    def total(self) -> float:
        """Everything that is computed."""
        return self.model + self.hypernetwork + self.recomputed


@cache
def step_flops(config: ModelConfig, batch_size: int) -> StepFlops:
    """FLOPs of an optimizer step on `batch_size` sequences of `config.max_length` tokens."""
    tokens = batch_size * config.max_length
    f, g = (config.num_steps * evaluations for evaluations in SCHEMES[config.scheme].evaluations)
    projections = 2 * tokens * f * kernel_size(config, "attention")
    # 2 L H G for the scores and as much for the sums of values; half of each is masked.
    attention = 2 * tokens * f * config.max_length * config.num_heads * config.head_width
    mlp = 2 * tokens * g * kernel_size(config, "mlp")
    head = 2 * tokens * config.vocab_size * config.embed_dim
    return StepFlops(
        projections=3 * projections,
        attention=3 * attention,
        mlp=3 * mlp,
        head=3 * head,
        hypernetwork=3 * _hypernetwork_flops(config),
        recomputed=2 * tokens * _recomputed_kernels(config)
        + _recomputed_attention(config) * attention
        + head,
        attention_kernels=attention * _kernel_work(config),
    )


def _recomputed_kernels(config: ModelConfig) -> float:
    """Entries of the kernels whose products `model.remat` recomputes, summed over solver steps.

    The gradient doesn't need the result of a product that is added to the residual stream, unless
    the rest of the solver step reads it.
    """
    f, g = (config.num_steps * evaluations for evaluations in SCHEMES[config.scheme].evaluations)
    if config.remat in ("none", "dots"):
        return 0
    if config.remat.startswith("every:"):
        return f * kernel_size(config, "attention") + g * kernel_size(config, "mlp")
    kept = kept_names(config.remat) if config.remat.startswith("keep:") else ()
    named = {"qkv": ("qkv", "query", "key", "value"), "mlp": ("up", "gate")}
    again = {part for name, parts in named.items() if name not in kept for part in parts}
    if config.scheme != "euler":
        again.add("output")
    if config.scheme not in ("euler", "lie_trotter"):
        again.add("down")
    sizes = {
        path: prod(leaf.value.shape)
        for path, leaf in _generated_leaves(config).items()
        if leaf.role == "kernel" and path[1] in again
    }
    return sum(size * (f if path[0] == "attention" else g) for path, size in sizes.items())


def _recomputed_attention(config: ModelConfig) -> int:
    """Whether `model.remat` recomputes scores and sums of values, as 0 or 1.

    A GPU's kernel has to, even if its output is saved: the softmax's sums are internal to it.
    """
    kept = config.remat.startswith("keep:") and "attention" in kept_names(config.remat)
    return 0 if config.remat == "none" or (kept and config.attention.startswith("splash")) else 1


def _kernel_work(config: ModelConfig) -> float:
    """FLOPs of a fused attention kernel in an optimizer step, over what the forward pass needs."""
    again = _recomputed_attention(config)
    if not config.attention.startswith("splash"):
        # Two products forward, five backward: two for each of those, and the scores again.
        return 1 + again + 5 / 2
    head_dim = config.head_width
    blocks = splash_blocks(config.attention, config.max_length, head_dim)
    backward = 5 if blocks.fused else 7
    widened = (head_dim + -head_dim % LANES) / head_dim
    # Of n blocks in a row of the mask, (n + 1) / 2 are visited on average; n / 2 are needed.
    visited = 1 + blocks.size / config.max_length
    return widened * visited * (1 + again + backward / 2)


def forward_flops(config: ModelConfig) -> float:
    """FLOPs per token of a forward pass over a whole sequence, excluding those that make W(t)."""
    return step_flops(config, 1).model / 3 / config.max_length


def mfu(model_flops: float, seconds: float, num_devices: int, peak_flops: float) -> float:
    """Model FLOPs utilisation, as a fraction of 1.

    Args:
      model_flops: `StepFlops.model` of an optimizer step.
      seconds: the time that the step takes.
      num_devices: the number of devices that share the step.
      peak_flops: peak FLOP/s of a device (`chips.py`).
    """
    return model_flops / (seconds * num_devices * peak_flops)


def _generated_leaves(config: ModelConfig) -> dict[tuple[str, ...], Parameter]:
    """The block parameters that a weight source makes, by path."""
    block = Block(replace(config, attention="xla"), parent=None)  # any kernel has these shapes
    return block_parameters(block, block.input_shapes())


def kernel_size(config: ModelConfig, part: str) -> int:
    """Entries of the kernels of a part of the block, "attention" or "mlp"."""
    leaves = _generated_leaves(config).items()
    return sum(prod(x.value.shape) for p, x in leaves if p[0] == part and x.role == "kernel")


def _hypernetwork_flops(config: ModelConfig) -> float:
    if config.weights != "time_dependent":
        return 0
    T, S = config.time_embed_dim, config.num_frequencies
    leaves = _generated_leaves(config)
    layers = 1 if config.time_embedding == "shared" else len({path[:-1] for path in leaves})
    products = sum(prod(leaf.value.shape) for leaf in leaves.values())
    return 2 * config.num_nodes * (T * products + layers * ((2 * S + 1) * T + T * T))
