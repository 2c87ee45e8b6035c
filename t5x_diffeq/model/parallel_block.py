"""Attention and MLP that read the same normalised state, as in GPT-J and PaLM.

    --config.model.block=t5x_diffeq.model.parallel_block:ParallelBlock

f(y) = attention(norm(y)), g(y) = mlp(norm(y)), with a single norm (Wang and Komatsuzaki 2021;
Chowdhery et al. 2022). Euler's step reads y once, so with `model.scheme=euler` and
`model.step_size=1` the per-layer model is the published one.
"""

from flax import linen as nn

from t5x_diffeq.model.attention_block import AttentionBlock, TransformerBlock
from t5x_diffeq.model.config_layers import mlp_of
from t5x_diffeq.model.layers.array_types import State


class ParallelBlock(AttentionBlock):
    """GPT's or Llama's attention and MLP behind one norm."""

    scopes = ("attention", "mlp")
    needs = {"norm_position": "before", "mlp_input": "state"}  # noqa: RUF012

    def setup(self):  # noqa: D102
        super().setup()
        self.mlp = mlp_of(self.config)
        self.mlp_dropout = nn.Dropout(self.config.dropout_rate)

    def g(self, y: State, deterministic: bool = True) -> State:
        """The MLP of the state that attention reads too."""
        output = self.mlp_dropout(self.mlp(self.attention_norm(y)), deterministic=deterministic)
        return output.astype(self.config.state_dtype)

    # An MLP has the same FLOPs and factors, whatever it reads.
    flops = TransformerBlock.flops
    spectral_factors = TransformerBlock.spectral_factors
