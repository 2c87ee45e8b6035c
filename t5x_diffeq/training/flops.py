"""How much work a training step is, by formula, and how much of the hardware's peak it uses.

MFU, model FLOPs utilisation (Chowdhery et al. 2022, appendix B): FLOPs that the model needs, over
what the devices could do in the time. A multiply-add is two FLOPs; only matrix products count;
causal attention counts half of its square; looking up embeddings is free; the head counts; backward
is twice forward. What is computed again backward is no model FLOP, and neither is making W(t),
which the per-layer baseline doesn't need: both are listed apart.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import prod

from t5x_diffeq.layers.parameter import Parameter
from t5x_diffeq.models.block import Block
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.ode.solvers import SCHEMES
from t5x_diffeq.ode.weights import block_parameters
from t5x_diffeq.report import say
from t5x_diffeq.training.chips import CHIPS, chip

# Peak dense bf16 FLOP/s of a device by its kind.
PEAK_FLOPS = {kind: figures.peak_flops for kind, figures in CHIPS.items()}


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a training step, forward and backward, of the whole batch.

    Attributes:
      projections: q, k, v and output of attention.
      attention: scores and mixing of values, half of the square.
      mlp: the MLP.
      head: logits.
      hypernetwork: making W(t) from t, once per step; 0 for other weights.
      recomputed: what is computed again backward, `model.remat` and the logits.
      attention_kernels: of a fused attention kernel, forward, again and backward; a part of the
        above, with the scores that its backward pass makes again for itself.
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
        """What MFU counts: without the hypernetwork and what is computed again."""
        return self.projections + self.attention + self.mlp + self.head

    @property
    def total(self) -> float:
        """All that is computed."""
        return self.model + self.hypernetwork + self.recomputed


@cache
def step_flops(config: ModelConfig, batch_size: int) -> StepFlops:
    """The work of a training step on `batch_size` sequences of `config.max_length` tokens."""
    tokens = batch_size * config.max_length
    f, g = (config.num_steps * evaluations for evaluations in SCHEMES[config.scheme].evaluations)
    projections = 2 * tokens * f * kernel_size(config, "attention")
    # 2 L D for the scores and as much for the mixing; half of each is masked.
    attention = 2 * tokens * f * config.max_length * config.embed_dim
    mlp = 2 * tokens * g * kernel_size(config, "mlp")
    head = 2 * tokens * config.vocab_size * config.embed_dim
    again = 0 if config.remat == "none" else 1
    scores_alone = config.remat == "dots"
    block_again = again * (attention + (0 if scores_alone else projections + mlp))
    return StepFlops(
        projections=3 * projections,
        attention=3 * attention,
        mlp=3 * mlp,
        head=3 * head,
        hypernetwork=3 * hypernetwork_flops(config),
        recomputed=block_again + head,
        # Forward are two products, backward five: two for each of them and the scores again.
        attention_kernels=attention * (1 + again + 2.5),
    )


def forward_flops(config: ModelConfig) -> float:
    """FLOPs per token of a forward pass over a whole sequence, without those that make W(t)."""
    return step_flops(config, 1).model / 3 / config.max_length


def mfu(model_flops: float, seconds: float, num_devices: int, device_kind: str) -> float | None:
    """Model FLOPs utilisation, of 1; None, and said, if the kind of device isn't known.

    Args:
      model_flops: `StepFlops.model` of a step.
      seconds: that the step takes.
      num_devices: that share the step.
      device_kind: `jax.Device.device_kind`.
    """
    peak = peak_flops(device_kind)
    return None if peak is None else model_flops / (seconds * num_devices * peak)


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device; None, and said, if its kind isn't known."""
    figures = chip(device_kind)
    if figures is None:
        say(f"no MFU: the peak FLOP/s of device kind {device_kind!r} are not known")
        return None
    return figures.peak_flops


def generated(config: ModelConfig) -> dict[tuple[str, ...], Parameter]:
    """What a weight source makes: the block's parameters by path."""
    block = Block(replace(config, attention="xla"), parent=None)  # shapes are those of any kernel
    return block_parameters(block, block.input_shapes())


def kernel_size(config: ModelConfig, part: str) -> int:
    """Entries of the kernels of a part of the block, "attention" or "mlp"."""
    leaves = generated(config).items()
    return sum(prod(x.value.shape) for p, x in leaves if p[0] == part and x.role == "kernel")


def hypernetwork_flops(config: ModelConfig) -> float:
    """FLOPs of making the weights of all times, forward: e(t), then P e(t) for every leaf."""
    if config.weights != "time_dependent":
        return 0
    N, T, S = config.num_nodes, config.time_embed_dim, config.num_frequencies
    leaves = generated(config)
    layers = 1 if config.time_embedding == "shared" else len({path[:-1] for path in leaves})
    products = sum(prod(leaf.value.shape) for leaf in leaves.values())
    return 2 * N * (T * products + layers * ((2 * S + 1) * T + T * T))
