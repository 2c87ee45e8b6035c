"""The language model: embed -> integrate -> norm -> logits, for every choice of weight source."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Bool, Float

from t5x_diffeq.model import sub_fields
from t5x_diffeq.model.adapters import Adapters, merge
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.array_types import (
    Cache,
    Logits,
    Places,
    State,
    States,
    Times,
    Tokens,
    Weights,
)
from t5x_diffeq.model.layers.embedding import Embedding
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.model.layers.norm import Norm
from t5x_diffeq.model.layers.parameter import Parameter, declare, flatten_parameters
from t5x_diffeq.model.ode.integrate import integrate_with_caches, trajectory, weights_by_step
from t5x_diffeq.model.ode.running_cost import Rate
from t5x_diffeq.model.ode.solvers import find_scheme, grid
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.ode.weight_source import Embeddings, LeafPath, WeightSource, layer_name
from t5x_diffeq.system.errors import InputError


def make_source(config: ModelConfig, **module: Any) -> WeightSource:
    """The weight source that the config names, for the config's block and grid.

    `module` holds Linen's own arguments, such as `parent` and `name`.
    """
    return source_of(
        config,
        block=sub_fields.module_of_weights(config),
        inputs=sub_fields.block_of_shapes(config).input_shapes(),
        num_nodes=config.num_nodes,
        dtype=config.compute_dtype,
        **module,
    )


@cache
def source_parameters(config: ModelConfig) -> dict[LeafPath, Parameter]:
    """The parameters of the config's source by path, with shapes in place of arrays."""
    source = make_source(config, parent=None)
    variables = jax.eval_shape(source.init, jax.random.key(0), jnp.asarray(nodes(config)))
    return flatten_parameters(variables["params"])


def program_of_source(config: ModelConfig) -> str:
    """The program that makes W(t) of one t, as text (StableHLO).

    If two configs have the same text, as the configs of two grids may, they have the same function
    W(t) of the same parameters, so one call of the source can make the weights of both.
    """
    source = make_source(config, parent=None)
    leaves = {path: leaf.value for path, leaf in source_parameters(config).items()}
    variables, time = {"params": unflatten_dict(leaves)}, jax.ShapeDtypeStruct((1,), jnp.float32)
    make = nn.apply(type(source).with_embeddings, source)
    return jax.jit(make).lower(variables, time).as_text()


def nodes(config: ModelConfig) -> Float[np.ndarray, " nodes"]:
    """The times at which a forward pass reads the weights, in the order in which it reads them."""
    return grid(config.scheme, config.num_steps).reshape(-1)


def in_one_document(tokens: Tokens) -> Places:
    """The places of tokens whose rows are one document each."""
    return Places(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))


class LanguageModel(nn.Module):
    """An autoregressive language model over the padded vocabulary."""

    config: ModelConfig

    def setup(self):  # noqa: D102
        c = self.config
        gpt = c.architecture == "gpt"
        dtypes: dict[str, Any] = {"dtype": c.compute_dtype, "state_dtype": jnp.dtype(c.state_dtype)}
        table: Callable[..., Embedding] = partial(Embedding, embed_dim=c.embed_dim, **dtypes)
        # A tied table is also the head, and begins with the head's scale.
        self.token_embedding = table(c.padded_vocab_rows, init_std=0.02 if c.has_tied_head else 1.0)
        if gpt:
            self.position_embedding = table(c.max_length, axis=None, init_std=0.01)
        if not c.has_tied_head:
            self.head = declare(
                self,
                "head",
                nn.initializers.normal(0.02),
                (c.embed_dim, c.padded_vocab_rows),
                ("embed", "vocab"),
                "kernel",
                fan_in=c.embed_dim,
            )
        self.embedding_dropout = nn.Dropout(c.dropout_rate)
        self.source = make_source(c)
        if c.adapter_rank:
            block = sub_fields.block_of_shapes(c)
            self.adapters = Adapters(
                block,
                block.input_shapes(),
                c.adapter_kernels,
                c.num_nodes,
                c.adapter_rank,
                c.adapter_alpha,
                c.compute_dtype,
            )
        self.final_norm = Norm(
            centred=gpt, use_shift=gpt, epsilon=c.final_norm_eps, dtype=c.compute_dtype
        )

    @nn.nowrap
    def at_depth(self, num_steps: int | None, scheme: str | None = None) -> "LanguageModel":
        """The same model, with the same parameters, on another grid and with its weight source.

        Raises:
          InputError: as `ModelConfig.at_depth`; or if the source of that grid declares other
            parameters.
        """
        other = LanguageModel(self.config.at_depth(num_steps, scheme))
        own_shapes, shapes = (
            {path: leaf.value.shape for path, leaf in source_parameters(model.config).items()}
            for model in (self, other)
        )
        for path in sorted({*own_shapes} | {*shapes}):
            if own_shapes.get(path) != shapes.get(path):
                raise InputError(
                    f"num_steps={other.config.num_steps} with scheme {other.config.scheme}: "
                    f"{self.config.weights} weights have the parameter {layer_name(path)} of shape "
                    f"{shapes.get(path)} there, and of shape {own_shapes.get(path)} on the model's "
                    "own grid; keep num_steps and scheme, or declare it in the same shape on all "
                    "grids"
                )
        return other

    def __call__(self, tokens: Tokens, deterministic: bool = True) -> Logits:
        """The logits of each token's successor; a row of tokens is one document."""
        return self.logits(self.hidden(tokens, self.weights(), None, deterministic))

    def state_and_head(
        self,
        tokens: Tokens,
        weights: Weights | None = None,
        places: Places | None = None,
        deterministic: bool = True,
        rates: tuple[Rate, ...] = (),
    ) -> tuple[State, Float[Array, "V D"], list[Float[Array, "B L"]]]:
        """The normalised state at t = 1 and the head's vectors, from which the loss is computed.

        Args:
          weights: leaves `[nodes, ...]`; None: they are made here.
          rates: the rates of running costs; their means over depth are returned third (`solve`).
        """
        weights = self.weights() if weights is None else weights
        y, costs = self._hidden_and_costs(tokens, weights, places, deterministic, rates)
        return y, self.head_vectors(), costs

    def weights(self, times: Times | None = None) -> Weights:
        """The block's weights at the nodes, or at `times`: leaves `[nodes, ...]`.

        Adapters are in the tree under the name `ADAPTERS`.
        """
        weights, _ = self.weights_and_embeddings(times)
        return weights

    @jax.named_scope("make W(t)")
    def weights_and_embeddings(self, times: Times | None = None) -> tuple[Weights, Embeddings]:
        """`weights`, and e(t) of each generated layer; {} if no e(t) makes the weights."""
        times = jnp.asarray(nodes(self.config)) if times is None else times
        weights, embeddings = self.source.with_embeddings(times)
        if self.config.adapter_rank:
            weights = {**weights, ADAPTERS: self.adapters()}
        return weights, embeddings

    def derivative(self) -> Weights:
        """dW/dt at the nodes, float32; only where W(t) exists at any time."""
        return self.source.derivative(jnp.asarray(nodes(self.config)))

    def merged_weights(self, times: Times | None = None) -> Weights:
        """`weights`, with adapters merged into the kernels."""
        return merge(self.weights(times))

    def merged_weights_by_step(self) -> list[Weights]:
        """`merged_weights`, as one tree per solver step: leaves `[nodes per step, ...]`."""
        return weights_by_step(self.merged_weights(), self.config.scheme, self.config.num_steps)

    def hidden(
        self,
        tokens: Tokens,
        weights: Weights,
        places: Places | None = None,
        deterministic: bool = True,
    ) -> State:
        """The normalised state at t = 1, which the head reads."""
        return self._hidden_and_costs(tokens, weights, places, deterministic)[0]

    def _hidden_and_costs(
        self,
        tokens: Tokens,
        weights: Weights,
        places: Places | None,
        deterministic: bool,
        rates: tuple[Rate, ...] = (),
    ) -> tuple[State, list[Float[Array, "B L"]]]:
        places = in_one_document(tokens) if places is None else places
        y = self.embed(tokens, places)
        y = self.embedding_dropout(y, deterministic=deterministic)
        y, costs = self.integrate(y, places, weights, deterministic, rates)
        return self.normalise(y), costs

    @nn.nowrap
    def empty_caches(self, batch_size: int, length: int) -> list[Cache]:
        """Empty caches, one for each evaluation of f in a pass."""
        sub_fields.need_methods(self.config, ("extend", "empty_cache"))
        evaluations_of_f, _ = find_scheme(self.config.scheme).evaluations
        block = sub_fields.make_block(self.config)
        count = self.config.num_steps * evaluations_of_f
        return [block.empty_cache(batch_size, length) for _ in range(count)]

    def extend(
        self,
        tokens: Tokens,
        places: Places,
        real: Bool[Array, "B L"],
        weights: list[Weights],
        caches: list[Cache],
    ) -> tuple[State, list[Cache]]:
        """The normalised state at t = 1 of new tokens, and the caches with these tokens added.

        Args:
          tokens: the new tokens of each row, padded at the end to one length.
          places: as `Block.extend` takes them.
          real: which of the new tokens aren't padding.
          weights: an entry per solver step, from `merged_weights_by_step`.
          caches: from `empty_caches` or from an earlier call.
        """
        c = self.config
        y, caches = integrate_with_caches(
            *sub_fields.cached_sub_fields(c, places, real),
            weights,
            self.embed(tokens, places),
            caches,
            scheme=c.scheme,
            step_size=c.dt,
        )
        return self.normalise(y), caches

    def normalise(self, y: State) -> State:
        """The final norm."""
        return self.final_norm(y)

    def integrate(
        self,
        y: State,
        places: Places,
        weights: Weights,
        deterministic: bool = True,
        rates: tuple[Rate, ...] = (),
    ) -> tuple[State, list[Float[Array, "B L"]]]:
        """The state at t = 1 from y at t = 0, and the mean over depth of each rate (`solve`)."""
        key = None if deterministic else self.make_rng("dropout")
        return sub_fields.solve(self.config, weights, y, places, key, rates)

    def trajectory(self, tokens: Tokens, weights: Weights) -> States:
        """The states at t = 0, 1/N, ..., 1; a row of tokens is one document."""
        c = self.config
        places = in_one_document(tokens)
        return trajectory(
            partial(sub_fields.vector_field, c),
            weights,
            self.embed(tokens, places),
            places,
            scheme=c.scheme,
            num_steps=c.num_steps,
            step_size=c.dt,
        )

    def trajectory_of_pass(self, tokens: Tokens) -> States:
        """`trajectory` with the weights of a forward pass."""
        return self.trajectory(tokens, self.weights())

    def embed(self, tokens: Tokens, places: Places) -> State:
        """The state at t = 0."""
        with jax.named_scope("embed"):
            y = self.token_embedding(tokens)
            if self.config.embedding_scale != 1:
                y = y * self.config.embedding_scale
            if self.config.architecture == "llama":
                return y
            positions = self.position_embedding(places.positions)
            scale = self.config.position_scale
            return y + (positions if scale == 1 else positions * scale)

    def head_vectors(self) -> Float[Array, "V D"]:
        """A vector per token of the padded vocabulary; its product with the state is the logit."""
        with jax.named_scope("head"):
            vectors = self.token_embedding.table if self.config.has_tied_head else self.head.T
            # `model.embedding_rows` can add rows that no token of the vocabulary has.
            return vectors[: self.config.padded_vocab_size].astype(self.config.compute_dtype)

    def logits(self, y: State) -> Logits:
        """Float32 logits over the padded vocabulary; the logits of padding are minus infinity."""
        head = self.head_vectors()
        with jax.named_scope("head"):
            logits = jnp.einsum("bld,vd->blv", y, head, preferred_element_type=jnp.float32)
        logits = nn.with_logical_constraint(logits, ("batch", "length", "vocab"))
        real = jnp.arange(logits.shape[-1]) < self.config.vocab_size
        return jnp.where(real, logits, -jnp.inf)
