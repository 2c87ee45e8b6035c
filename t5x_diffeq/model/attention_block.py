"""Blocks whose f is attention: a base class, and the block of GPT and Llama, whose g is an MLP."""

from flax import linen as nn
from jaxtyping import Array, Bool, Float

from t5x_diffeq.model.block import Block, Factors, Matrices, SubFieldFlops, kernel_flops
from t5x_diffeq.model.config_layers import attention_of, mlp_of, norm_of
from t5x_diffeq.model.layers.array_types import Cache, Places, State, Weights
from t5x_diffeq.model.layers.attention import empty_keys_and_values


class AttentionBlock(Block):
    """f(y) = attention(norm(y)); a subclass adds g, `flops` and `spectral_factors`.

    With `config.norm_position="after"`, f(y) = norm(attention(y)).
    """

    has_attention_kernel = True
    splits_length = True

    def setup(self):  # noqa: D102
        self.attention_norm = norm_of(self.config)
        self.attention = attention_of(self.config)
        self.attention_dropout = nn.Dropout(self.config.dropout_rate)

    def f(self, y: State, places: Places, deterministic: bool = True) -> State:
        """The attention sub-field."""
        output, _ = self._attend(y, places)
        dropped = self.attention_dropout(output, deterministic=deterministic)
        return dropped.astype(self.config.state_dtype)

    @nn.nowrap
    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """Keys and values, `[B, length, K, G]` each."""
        c = self.config
        heads = (c.kv_heads, c.head_width)
        return empty_keys_and_values((batch_size, length, *heads), c.compute_dtype)

    def extend(
        self, y: State, places: Places, real: Bool[Array, "B L"], cache: Cache
    ) -> tuple[State, Cache]:
        """The attention of new tokens to the cached ones and to themselves.

        Padding is cached too, but later tokens replace it before any real token attends to it.
        """
        output, cache = self._attend(y, places, cache)
        return output.astype(self.config.state_dtype), cache

    def _attend(self, y: State, places: Places, cache: Cache | None = None) -> tuple[State, Cache]:
        output, cache = self.attention(self._attention_input(y), places, cache)
        after = self.config.norm_position == "after"
        return (self.attention_norm(output) if after else output), cache

    def _attention_input(self, y: State) -> State:
        after = self.config.norm_position == "after"
        return y.astype(self.config.compute_dtype) if after else self.attention_norm(y)

    def attention_matrix(self, y: State, places: Places) -> Float[Array, "B H L L"]:
        """softmax(q k^T / sqrt(G)), causal."""
        return self.attention.matrix(self._attention_input(y), places)

    @nn.nowrap
    def attention_flops(self, length: int) -> SubFieldFlops:
        """The FLOPs of f. A multiply-add is two; causal attention counts half of its square."""
        kernels = {path[1]: x for path, x in kernel_flops(self).items() if path[0] == "attention"}
        products, last = sum(kernels.values()), kernels["output"]
        # 2 L H G for the scores and as much for the sums of values; half of each is masked.
        mixing = 2 * length * self.config.num_heads * self.config.head_width
        return SubFieldFlops(products, mixing, last, named={"qkv": products - last})

    @nn.nowrap
    def attention_factors(self, weights: Weights) -> Factors:
        """QK and OV of each head (`analysis.spectra`): `[nodes, H, D, G]`, `[nodes, H, G, D]`."""
        query, key, value = _split_heads(weights["attention"])
        output = weights["attention"]["output"]["kernel"]
        return {
            "qk": (query.swapaxes(1, 2), key.transpose(0, 2, 3, 1)),
            "ov": (value.swapaxes(1, 2), output),
        }


def _split_heads(attention: dict) -> tuple[Float[Matrices, "nodes D H G"], ...]:
    """W_Q, W_K and W_V of each query head, from one fused linear (GPT) or three linears (Llama)."""
    if "qkv" in attention:
        kernel = attention["qkv"]["kernel"]
        return kernel[:, :, 0], kernel[:, :, 1], kernel[:, :, 2]
    kernels = [attention[name]["kernel"] for name in ("query", "key", "value")]
    heads = kernels[0].shape[2]
    return tuple(kernel.repeat(heads // kernel.shape[2], axis=2) for kernel in kernels)


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
        return dropped.astype(self.config.state_dtype)

    @nn.nowrap
    def flops(self, length: int) -> tuple[SubFieldFlops, SubFieldFlops]:
        """The FLOPs of attention, and of the MLP's linears."""
        kernels = {path[1]: x for path, x in kernel_flops(self).items() if path[0] == "mlp"}
        wide = sum(x for name, x in kernels.items() if name != "down")
        mlp = SubFieldFlops(
            products=sum(kernels.values()), last=kernels["down"], named={"mlp": wide}
        )
        return self.attention_flops(length), mlp

    @nn.nowrap
    def spectral_factors(self, weights: Weights) -> Factors:
        """QK and OV of each head, and W_up W_down; a gate is left out."""
        up, down = (weights["mlp"][name]["kernel"] for name in ("up", "down"))
        return {**self.attention_factors(weights), "mlp": (up, down)}
