"""Attention rollout, the usual explanation from attention weights (Abnar and Zuidema 2020).

Compared with Lyapunov exponents, it shows what the values and the MLP add (paper, appendix B.2).
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from t5x_diffeq.array_types import Places, State, Tokens, Weights
from t5x_diffeq.layers.rotary import rotate
from t5x_diffeq.models.block import Block
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.models.language_model import LanguageModel, in_one_document
from t5x_diffeq.ode.solvers import SCHEMES

_PROJECTIONS = ("qkv", "query", "key", "value")


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
    """
    config = replace(model.config.in_float32(), attention="xla", remat="none")
    model, nodes = LanguageModel(config), len(SCHEMES[config.scheme].nodes)
    weights = jax.jit(partial(model.apply, method="merged_weights"))({"params": params})
    states = jax.jit(partial(model.apply, method="trajectory"))({"params": params}, tokens, weights)
    first = jax.tree.map(lambda leaf: leaf[::nodes], weights)
    matrix = jax.jit(partial(_attention_matrix, config))
    flow = np.eye(tokens.shape[1])
    for n in range(config.num_steps):
        A = np.asarray(matrix(jax.tree.map(lambda leaf, n=n: leaf[n], first), states[n]))
        flow = (A.mean(1) + np.eye(tokens.shape[1])) / 2 @ flow
    return flow[np.arange(len(outputs)), outputs]


def _attention_matrix(config: ModelConfig, W: Weights, y: State) -> Float[Array, "B H L L"]:
    """The block's softmax(q k^T / sqrt(G)) at one state, from its own projections."""
    block = Block(config, parent=None)
    places = in_one_document(jnp.zeros(y.shape[:2], jnp.int32))
    q, k = _project_queries_and_keys(block, W, y, places)
    if config.architecture == "llama":
        q, k = rotate(q, places.positions), rotate(k, places.positions)
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = jnp.einsum("blhg,bmhg->bhlm", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))


def _project_queries_and_keys(
    block: Block, W: Weights, y: State, places: Places
) -> tuple[Float[Array, "B L H G"], Float[Array, "B L K G"]]:
    """The block's queries and keys, before rotary positions."""

    def is_projection(module: nn.Module, method: str) -> bool:
        return module.name in _PROJECTIONS and method == "__call__"

    _, found = nn.apply(Block.f, block, capture_intermediates=is_projection)(
        {"params": W}, y, places
    )
    outputs = found["intermediates"]["attention"]
    if "qkv" in outputs:
        (qkv,) = outputs["qkv"]["__call__"]
        return qkv[:, :, 0], qkv[:, :, 1]
    return outputs["query"]["__call__"][0], outputs["key"]["__call__"][0]
