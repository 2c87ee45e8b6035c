"""GPT's and Llama's block: attention f and MLP g."""

import jax
from flax import linen as nn

from t5x_diffeq.model.attention_block import AttentionBlock
from t5x_diffeq.model.block import Factors, SubFieldFlops, kernel_flops
from t5x_diffeq.model.config_layers import mlp_of, norm_of
from t5x_diffeq.model.layers.array_types import State, Weights


class TransformerBlock(AttentionBlock):
    """f(y) = attention(norm(y)), g(y) = mlp(norm'(y)); GPT's or Llama's layers inside.

    With `config.mlp_input="attention_norm"`, g(y) = mlp(norm'(norm(y))), as in the official Llama.
    With `config.norm_position="after"`, f(y) = norm(attention(y)), g(y) = norm'(mlp(y)).
    The state and both results have `config.state_dtype`; in between, `config.dtype` is used.
    """

    scopes = ("attention", "mlp")

    def setup(self):  # noqa: D102
        super().setup()
        self.mlp_norm = norm_of(self.config)
        self.mlp = mlp_of(self.config)
        self.mlp_dropout = nn.Dropout(self.config.dropout_rate)

    def g(self, y: State, deterministic: bool = True) -> State:
        """The MLP sub-field."""
        if self.config.norm_position == "after":
            output = self.mlp_norm(self.mlp(y.astype(self.config.compute_dtype)))
        else:
            x = self.attention_norm(y) if self.config.mlp_input == "attention_norm" else y
            output = self.mlp(self.mlp_norm(x))
        dropped = self.mlp_dropout(output, deterministic=deterministic)
        # Without a barrier, the TPU compiler fuses the conversions to and from the state's dtype,
        # and the next norm's sums, into the MLP's products, which then take up to twice as long.
        return jax.lax.optimization_barrier(dropped).astype(self.config.state_dtype)

    @nn.nowrap
    def flops(self, length: int) -> tuple[SubFieldFlops, SubFieldFlops]:
        """Attention's, and those of the MLP's linears."""
        return self.attention_flops(length), mlp_flops(kernel_flops(self))

    @nn.nowrap
    def spectral_factors(self, weights: Weights) -> Factors:
        """QK and OV of each head, and W_up W_down; a gate is left out."""
        return {**self.attention_factors(weights), **mlp_factors(weights)}


def mlp_flops(of_kernels: dict[tuple[str, ...], float]) -> SubFieldFlops:
    """The FLOPs of a g that is an MLP of the name `mlp`, from those of all kernels."""
    of = {path[1]: flops for path, flops in of_kernels.items() if path[0] == "mlp"}
    wide = sum(flops for name, flops in of.items() if name != "down")
    return SubFieldFlops(products=sum(of.values()), last=of["down"], named={"mlp": wide})


def mlp_factors(weights: Weights) -> Factors:
    """W_up and W_down of an MLP of the name `mlp`."""
    return {"mlp": (weights["mlp"]["up"]["kernel"], weights["mlp"]["down"]["kernel"])}
