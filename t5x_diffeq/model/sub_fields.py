"""Makes a config's block a vector field, for passes from t = 0 to t = 1 and for new tokens."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from t5x_diffeq.config.plugins import make_plugin
from t5x_diffeq.model.adapters import block_variables
from t5x_diffeq.model.attention_block import TransformerBlock
from t5x_diffeq.model.block import Block, overrides_method
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.layers.array_types import Cache, Places, State, Weights
from t5x_diffeq.model.layers.context import from_zigzag, to_zigzag
from t5x_diffeq.model.layers.parameter import Parameter
from t5x_diffeq.model.ode.integrate import FieldOfKey, SubFieldWithCache, integrate
from t5x_diffeq.model.ode.running_cost import Rate, StateWithCost, charge
from t5x_diffeq.model.ode.solvers import SubField, VectorField, find_scheme
from t5x_diffeq.model.ode.weight_source import LeafPath, block_parameters
from t5x_diffeq.system.errors import InputError


def make_block(config: ModelConfig) -> Block:
    """The block that the config names, without a parent module.

    Raises:
      InputError: if no block has that name, if its arguments don't fit, or if a key has another
        value than the block `needs`.
    """
    if config.block is None:
        return TransformerBlock(config, parent=None)
    block = make_plugin("model.block", config.block, Block, config=config, parent=None)
    if not isinstance(block.needs, Mapping):
        raise InputError(
            f"model.block={config.block}: its needs are {block.needs!r:.60}; they must be a dict "
            "of keys of config.model and their values, as in needs = {'qk_norm': 'head'}"
        )
    if not isinstance(block.scopes, tuple) or len(block.scopes) != 2:
        raise InputError(
            f"model.block={config.block}: its scopes are {block.scopes!r:.60}; they must be two "
            "names, of f and of g, as in scopes = ('attention', 'mlp')"
        )
    for key, value in block.needs.items():
        if not hasattr(config, key):
            raise InputError(f"model.block={config.block} needs model.{key}, which is no key")
        if getattr(config, key) != value:
            raise InputError(
                f"model.{key}={getattr(config, key)}: the block {config.block} needs "
                f"{value}; set model.{key} to that"
            )
    return block


def block_of_shapes(config: ModelConfig) -> Block:
    """A block from which to read the shapes of its parameters.

    It has XLA's attention, which accepts lengths that the config's own kernel or a mesh may refuse.
    """
    return make_block(replace(config, attention="xla"))


class SchemeLeaves(nn.Module):
    """The leaves that the config's scheme declares."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> None:
        """Declares the leaves, as parameters of this module."""
        if declare_leaves := find_scheme(self.config.scheme).leaves:
            declare_leaves(self, self.config)
            if "params" not in self.variables:
                raise InputError(
                    f"model.scheme={self.config.scheme}: its leaves(module, config) declares none; "
                    "each is what declare(module, ...) of t5x_diffeq.model.layers.parameter makes"
                )


class BlockAndScheme(nn.Module):
    """A block, with the scheme's leaves as one more of its layers, named `scheme`."""

    block: Block

    def setup(self):  # noqa: D102
        nn.share_scope(self, self.block)
        self.scheme = SchemeLeaves(self.block.config)

    def __call__(self, y: State, places: Places) -> State:
        """The block's value; it also declares the scheme's leaves."""
        self.scheme()
        return self.block(y, places)


def module_of_weights(config: ModelConfig) -> nn.Module:
    """The module whose weights a source makes: the block, with the scheme's leaves if it has any.

    Like `block_of_shapes`, it is for reading shapes.
    """
    block = block_of_shapes(config)
    if find_scheme(config.scheme).leaves is None:
        return block
    return BlockAndScheme(block, parent=None)


def declared_leaves(config: ModelConfig) -> dict[LeafPath, Parameter]:
    """The parameters of a step by path, with shapes in place of arrays."""
    inputs = block_of_shapes(config).input_shapes()
    return block_parameters(module_of_weights(config), inputs)


def has_method(config: ModelConfig, method: str) -> bool:
    """Whether the config's block has this optional method of `Block`.

    The architecture's own block counts as having them all: `hf` exports it without `pytorch_form`.
    """
    if config.block is None:
        return True
    return overrides_method(type(make_block(config)), method)


def need_methods(config: ModelConfig, methods: tuple[str, ...]) -> None:
    """Raises an InputError unless the config's block has these optional methods."""
    for method in methods:
        if not has_method(config, method):
            raise make_block(config).lacks(method)


def cached_sub_fields(
    config: ModelConfig, places: Places, real: Bool[Array, "B L"]
) -> tuple[SubFieldWithCache, SubField]:
    """The block's f and g for new tokens; f takes a cache of earlier tokens, and returns it."""
    block = make_block(config)

    def f(W: Weights, y: State, cache: Cache) -> tuple[State, Cache]:
        return nn.apply(type(block).extend, block)(block_variables(W), y, places, real, cache)

    def g(W: Weights, y: State) -> State:
        return nn.apply(type(block).g, block)(block_variables(W), y)

    scope_f, scope_g = (jax.named_scope(name) for name in block.scopes)
    return scope_f(f), scope_g(g)


def vector_field(config: ModelConfig, places: Places) -> Callable[[Array | None], VectorField]:
    """A function that takes a step's dropout key (None: no dropout) and returns f and g."""
    block = make_block(config)
    f, g = (nn.apply(method, block) for method in (type(block).f, type(block).g))

    def with_key(key: Array | None) -> VectorField:
        rngs = None if key is None else {"dropout": key}

        def call(method: Callable[..., State], W: Weights, y: State, *args: Places) -> State:
            y = nn.with_logical_constraint(y, ("batch", "length", None))
            return method(block_variables(W), y, *args, deterministic=key is None, rngs=rngs)

        scope_f, scope_g = (jax.named_scope(name) for name in block.scopes)
        return VectorField(
            f=scope_f(lambda W, y: call(f, W, y, places)), g=scope_g(lambda W, y: call(g, W, y))
        )

    return with_key


def solve(
    config: ModelConfig,
    weights: Weights,
    y: State,
    places: Places,
    key: Array | None,
    rates: tuple[Rate, ...] = (),
) -> tuple[State, list[Float[Array, "B L"]]]:
    """The state at t = 1 from the state y at t = 0, and the mean over depth of each rate.

    Args:
      key: the dropout key; None: no dropout.
      rates: the rates that are integrated along the trajectory.
    """
    # Tokens are exchanged once per pass. Inside the field, every evaluation would exchange them.
    y, places = to_zigzag(y, places)

    def field(places: Places) -> FieldOfKey:
        field_of_key = vector_field(config, places)
        return (lambda key: charge(field_of_key(key))) if rates else field_of_key

    end = integrate(
        field,
        weights,
        StateWithCost.at_start(y, rates) if rates else y,
        places,
        scheme=config.scheme,
        num_steps=config.num_steps,
        step_size=config.dt,
        remat=config.remat,
        unroll=config.scan_unroll or 1,
        kept_dtype=config.compute_dtype,
        row_major=config.state_row_major,
        key=key,
    )
    if not rates:
        return from_zigzag(end), []
    depth = config.dt * config.num_steps
    return from_zigzag(end.y), [from_zigzag(cost) / depth for cost in end.costs]
