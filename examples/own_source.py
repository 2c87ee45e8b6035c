"""A weight source of one's own: the first and the last step have weights of their own.

    python -m examples.own_source

A source makes the block's weights at given times, from whatever parameters it declares;
`docs/extending.md` has the whole contract. This one is W(t) = W0 + P e(t) between its ends.
"""

# %%
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import t5x_diffeq as td
from t5x_diffeq.model.ode.solvers import grid
from t5x_diffeq.model.ode.sources import init_stacked
from t5x_diffeq.model.ode.time_dependent_weights import TimeDependentWeights
from t5x_diffeq.model.ode.weight_source import block_parameters, cast_by_role


class OwnEnds(TimeDependentWeights):
    """W0 + P e(t), but the first and the last step have parameters as their weights."""

    @nn.compact
    def with_embeddings(self, times):
        """The weights at `times`, and the e(t) between the ends."""
        made, embeddings = super().with_embeddings(times)
        ends = self.param("ends", lambda key: init_stacked(self.block, self.inputs, 2, key))
        ends = cast_by_role(ends, block_parameters(self.block, self.inputs), self.dtype)
        first, between = self._places(times)

        def choose(end, W):
            end = jnp.where(_by_node(first, W), end[0], end[1])
            return jnp.where(_by_node(between, W), W, end)

        # e(t) is zero at the ends, because no product with P makes their weights.
        embeddings = {name: e * between[:, None] for name, e in embeddings.items()}
        return jax.tree.map(choose, ends, made), embeddings

    def derivative(self, times):
        """dW/dt at `times`: zero at the ends, whose weights are constant."""
        _, between = self._places(times)
        return jax.tree.map(
            lambda rate: jnp.where(_by_node(between, rate), rate, 0), super().derivative(times)
        )

    @nn.nowrap
    def _places(self, times):
        """Whether each of `times` is in the first step, and whether it is between the ends."""
        nodes = np.unique(grid(self.config.scheme, self.config.num_steps))
        first = times < nodes[:2].mean()
        return first, ~first & (times <= nodes[-2:].mean())

    @nn.nowrap
    def is_smooth(self):
        """No: W(t) jumps next to its ends."""
        return False

    @nn.nowrap
    def num_polynomials(self):
        """None: W(t) is no polynomial of t."""
        return None

    @nn.nowrap
    def describe(self):
        """What it is, in a phrase."""
        return f"{super().describe()}, with a first and a last step of their own"


def _by_node(chosen, leaf):
    """`[nodes]` as `[nodes, 1, ...]`, to choose from a leaf `[nodes, ...]`."""
    return chosen.reshape(-1, *(1,) * (leaf.ndim - 1))


# %% A config names it as package.module:Name, here this file.
if __name__ == "__main__":
    SIZES = {
        "model.weights": "examples.own_source:OwnEnds",
        "model.num_steps": 4,
        "model.embed_dim": 64,
        "model.mlp_dim": 128,
        "data.tokenizer": "bytes",
        "data.sequence_length": 64,
        "train.total_steps": 20,
        "train.eval_batches": 2,
        "train.eval_all_at_end": False,
    }
    run = td.train(td.load_config("configs/tiny.py", SIZES), "workdirs/own_source")
    print(run.evaluate(eval_batches=2))
