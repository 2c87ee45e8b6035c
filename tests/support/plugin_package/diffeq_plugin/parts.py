"""What a config names: `diffeq_plugin.parts:NAME`."""

from pathlib import Path

import jax
import optax
from flax import linen as nn

import t5x_diffeq as td
from t5x_diffeq.model.attention_block import AttentionBlock
from t5x_diffeq.model.block import PyTorchForm, SubFieldFlops, kernel_flops
from t5x_diffeq.model.config_layers import norm_of, output_std
from t5x_diffeq.model.layers.linear import Linear


class SquaredBlock(AttentionBlock):
    """The architecture's attention, and an MLP with a squared ReLU (So et al. 2021)."""

    power: int = 2

    def setup(self):
        super().setup()
        c = self.config
        self.wide_norm = norm_of(c)
        self.widen = Linear((c.embed_dim, c.mlp_dim), ("embed", "mlp"), dtype=c.compute_dtype)
        self.narrow = Linear(
            (c.mlp_dim, c.embed_dim),
            ("mlp", "embed"),
            init_std=output_std(c),
            writes_residual=True,
            dtype=c.compute_dtype,
        )

    def g(self, y, deterministic=True):
        hidden = jax.nn.relu(self.widen(self.wide_norm(y))) ** self.power
        return self.narrow(hidden).astype(self.config.state_dtype)

    @nn.nowrap
    def flops(self, length):
        of = {path[0]: flops for path, flops in kernel_flops(self).items()}
        g = SubFieldFlops(of["widen"] + of["narrow"], last=of["narrow"])
        return self.attention_flops(length), g

    @nn.nowrap
    def spectral_factors(self, weights):
        squared = weights["widen"]["kernel"], weights["narrow"]["kernel"]
        return {**self.attention_factors(weights), "squared": squared}

    @nn.nowrap
    def pytorch_form(self):
        return PyTorchForm(
            modeling=Path(__file__).with_name("modeling_squared.py"),
            config_class="SquaredConfig",
            base_class="SquaredModel",
            model_class="SquaredForCausalLM",
            config={"power": self.power},
        )


class SilentBlock(SquaredBlock):
    """Another f and g: the inherited hooks are about those of `SquaredBlock`, so it has none."""

    def f(self, y, places, deterministic=True):
        return 2 * super().f(y, places, deterministic)

    def g(self, y, deterministic=True):
        return 3 * super().g(y, deterministic)


def make_with(nodes) -> td.Scheme:
    return td.Scheme(ralston_step, nodes, order=2, evaluations=(2, 2))


def unannotated(*arguments, **more):
    raise AssertionError("it was called")


def ralston_step(field, W, y, dt):
    W0, W1 = W
    k1 = field(W0, y)
    k2 = field(W1, y + 2 / 3 * dt * k1)
    return y + dt * (k1 + 3 * k2) / 4


ralston = td.Scheme(ralston_step, nodes=(0.0, 2 / 3), order=2, evaluations=(2, 2))


miscounted = td.Scheme(ralston_step, nodes=(0.0, 2 / 3), order=2, evaluations=(1, 1))
reads_too_much = td.Scheme(
    lambda field, W, y, dt: field(W[1], y), nodes=(0.0,), order=1, evaluations=(1, 1)
)
reads_all = td.Scheme(
    lambda field, W, y, dt: field(W, y), nodes=(0.0,), order=1, evaluations=(1, 1)
)


def make_nothing() -> td.Scheme:
    return None


def make_sign(keys, declared, momentum=0.9) -> optax.GradientTransformation:
    """Lion's direction."""
    return optax.scale_by_lion(b1=momentum, b2=keys.beta2)


def splits_by_name(data) -> tuple:
    return {"train": ["a text"], "validation": ["another"]}


def two_texts(data) -> tuple:
    return "a text", "another"


def numbers(data) -> tuple:
    return [1, 2], [3]


def half_characters(data) -> tuple:
    return ["one", "d\ud800"], ["two"]


def by_label(data) -> tuple:
    return ["one", "two"], {3: "three", 7: "seven"}


def generators(data) -> tuple:
    return (text for text in "abc"), (text for text in "d")


def failing(data) -> tuple:
    return 1 / 0


def documents(data, count=200) -> tuple[list[str], list[str]]:
    """Numbered lines, for training and for validation."""
    lines = [f"line {n} of the plug-in, {n * n} squared.\n" * 3 for n in range(count)]
    return lines[:-20], lines[-20:]
