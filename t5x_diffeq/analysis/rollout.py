"""Attention rollout, the usual explanation from attention weights (Abnar and Zuidema 2020).

Compared with Lyapunov exponents, it shows what the values and the MLP add (paper, appendix B.2).
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from t5x_diffeq.model.language_model import LanguageModel, in_one_document
from t5x_diffeq.model.layers.array_types import State, Tokens, Weights
from t5x_diffeq.model.ode.schemes import find_scheme
from t5x_diffeq.model.sub_fields import make_block, need_methods


def attention_rollout(
    model: LanguageModel, params: dict, tokens: Tokens, outputs: Int[np.ndarray, " B"]
) -> Float[np.ndarray, "B L"]:
    """How much of each input token attention carries to the output token; a row sums to 1.

    It is the product over the steps of (A + I) / 2, with A the mean over heads, at the weights and
    states with which each step begins.

    Args:
      model: the model.
      params: its parameters.
      tokens: prompts, padded at the end to one length.
      outputs: index of each prompt's output token.

    Raises:
      InputError: if the block has no `attention_matrix`.
    """
    config = replace(model.config.in_float32(), attention="xla", remat="none")
    model, nodes = LanguageModel(config), len(find_scheme(config.scheme).nodes)
    weights = jax.jit(partial(model.apply, method="merged_weights"))({"params": params})
    states = jax.jit(partial(model.apply, method="trajectory"))({"params": params}, tokens, weights)
    first = jax.tree.map(lambda leaf: leaf[::nodes], weights)
    need_methods(config, ("attention_matrix",))
    block = make_block(config)

    @jax.jit
    def matrix(W: Weights, y: State) -> Float[Array, "B H L L"]:
        return nn.apply(type(block).attention_matrix, block)(
            {"params": W}, y, in_one_document(tokens)
        )

    flow = np.eye(tokens.shape[1])
    for n in range(config.num_steps):
        A = np.asarray(matrix(jax.tree.map(lambda leaf, n=n: leaf[n], first), states[n]))
        flow = (A.mean(1) + np.eye(tokens.shape[1])) / 2 @ flow
    return flow[np.arange(len(outputs)), outputs]
