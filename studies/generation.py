"""How fast text is generated: with a cache, and without one.

    python -m studies.generation --config=configs/default.py --rounds=100

Prints the rates and their ratios as a table, and the rates as JSON. The ways take turns, so noise
on the machine affects all of them.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from t5x_diffeq.cli import command_line
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import Config
from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.system.console import Progress, log, print_result
from t5x_diffeq.training.partitioning import unbox
from t5x_diffeq.training.setup import expected_vocab_size, make_setup

FLAGS = VerbFlags("studies.generation")
CONFIG = FLAGS.define_config("Config file of the model.", "configs/default.py")
_ROUNDS = FLAGS.define_integer("rounds", "Number of tokens.", 100, 1)
_PROMPT_TOKENS = 16  # of the prompt whose continuation is timed
_WARM_UP_TOKENS = 3  # after which both programs are compiled


def main() -> None:
    """The command."""
    config = Config.of(CONFIG.value)
    model = make_setup(config, expected_vocab_size(config)).model
    with Progress("timing generation"):
        rates = generation_rates(model, _ROUNDS.value)
    for name, rate in rates.items():
        ratio = rates["cached"] / rate
        slower = "" if ratio == 1 else f"{ratio:>8.1f} times slower"
        log(f"{name:<20}{rate:>10.1f} tokens/s{slower}")
    print_result(json.dumps({f"{name}/tokens_per_second": rate for name, rate in rates.items()}))


def generation_rates(model: LanguageModel, rounds: int) -> dict[str, float]:
    """Tokens per second of one sequence, as medians over rounds, in which the ways take turns.

    `cached` is how `generate` works; `reread` runs the model on the whole prefix, recomputing W(t)
    and all states for each token; `reread_weights_kept` recomputes only the states.
    """
    length = model.config.max_length
    key, tokens = jax.random.key(0), jnp.zeros((1, length), jnp.int32)
    params = unbox(jax.jit(model.init)(key, tokens)["params"])
    weights = jax.jit(partial(model.apply, method="weights"))({"params": params})

    @jax.jit
    def reread(params: dict, weights: Weights | None) -> jax.Array:
        with_params = model.bind({"params": params})
        W = with_params.weights() if weights is None else weights
        return with_params.logits(with_params.hidden(tokens, W)[:, -1:]).argmax(-1)

    def start_generation() -> Callable[[], object]:
        greedy = Sampling(temperature=0)
        prompt, room = [1] * _PROMPT_TOKENS, length - _PROMPT_TOKENS
        following = generate(model, params, [prompt], room, greedy, key)
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
    for _ in range(min(rounds, length - _PROMPT_TOKENS - _WARM_UP_TOKENS - 1)):
        for name, token in ways.items():
            start = time.perf_counter()
            token()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1 / statistics.median(times) for name, times in seconds.items()}


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
