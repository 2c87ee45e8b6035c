"""The rate of generation: with the cache, and by rereading the whole prefix for each token."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.training.partitioning import unbox

_PROMPT = 16  # tokens
_WARM_UP_TOKENS = 3  # warm-up tokens, after which both programs are compiled


def generation_rates(model: LanguageModel, rounds: int) -> dict[str, float]:
    """Tokens per second of one sequence, as medians over rounds.

    `cached` is how `generate` works; `reread` runs the model on the whole prefix, recomputing W(t)
    and all states for each token; `reread_weights_kept` recomputes only the states.

    Args:
      model: the model; its parameters are freshly initialised.
      rounds: tokens timed per method, the methods taking turns.
    """
    length = model.config.max_length
    key, whole = jax.random.key(0), jnp.zeros((1, length), jnp.int32)
    params = unbox(jax.jit(model.init)(key, whole)["params"])
    weights = jax.jit(partial(model.apply, method="weights"))({"params": params})

    @jax.jit
    def reread(params: dict, weights: Weights | None) -> jax.Array:
        with_params = model.bind({"params": params})
        made = with_params.weights() if weights is None else weights
        return with_params.logits(with_params.hidden(whole, made)[:, -1:]).argmax(-1)

    def start_generation() -> Callable[[], object]:
        greedy = Sampling(temperature=0)
        following = generate(model, params, [[1] * _PROMPT], length - _PROMPT, greedy, key)
        for _ in range(_WARM_UP_TOKENS):
            next(following)
        return lambda: next(following)

    ways = {
        "cached": start_generation(),
        "reread": lambda: reread(params, None).block_until_ready(),
        "reread_weights_kept": lambda: reread(params, weights).block_until_ready(),
    }
    for token in ways.values():
        token()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(min(rounds, length - _PROMPT - _WARM_UP_TOKENS - 1)):
        for name, token in ways.items():
            start = time.perf_counter()
            token()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1 / statistics.median(times) for name, times in seconds.items()}
