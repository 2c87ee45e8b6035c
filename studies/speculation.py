"""Speculative decoding by depth: a model on a coarse grid drafts for itself on a fine one.

    python -m studies.speculation --workdir=DIR --draft_steps=2 --draft_tokens=2 --draft_tokens=4

draft_steps of the N solver steps draft k tokens, and one pass of all N verifies them, so that the
tokens are those of plain generation. Prints a JSON object for each way: how many drafted tokens are
accepted, how many tokens of `generate` take the CPU time of a draft and its verification, and how
fast the way is relative to `generate`. The ways take turns. `plain` is a control: plain generation,
k + 1 tokens a program.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from jaxtyping import Array

from studies.drafts import DRAFTS, by_drafts, drafter_of, plainly
from t5x_diffeq.cli import command_line, flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.inference.sampling import Sampling, generate, make_weights_by_step
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.load import load_run

FLAGS = VerbFlags("studies.speculation")
_WORKDIR = FLAGS.define_workdir()
_NUM_STEPS = FLAGS.define_num_steps()
_DRAFT_STEPS = flags.DEFINE_multi_integer(
    "draft_steps", [2], "Solver steps of a draft; may be repeated.", 1, flag_values=FLAGS
)
_DRAFT_TOKENS = flags.DEFINE_multi_integer(
    "draft_tokens", [1, 2, 4], "Tokens of a draft; may be repeated.", 1, flag_values=FLAGS
)
_DRAFTS = flags.DEFINE_multi_enum(
    "draft",
    ["coarse"],
    DRAFTS,
    "Which steps draft; see studies/drafts.py. May be repeated.",
    flag_values=FLAGS,
)
_TEMPERATURES = flags.DEFINE_multi_float(
    "temperature", [0.0, 1.0], "0 is greedy; may be repeated.", 0, flag_values=FLAGS
)
_TEXTS = FLAGS.define_integer("texts", "Number of texts to continue.", 12, 1)
_PROMPT_TOKENS = FLAGS.define_integer("prompt_tokens", "Tokens of each prompt.", 32, 2)
_MAX_TOKENS = FLAGS.define_integer("max_tokens", "Tokens to add to each.", 80, 1)


def by_generate(
    model: LanguageModel, params: dict, temperature: float, prompt: list[int], key: Array
) -> Iterator[tuple[list[int], int]]:
    """The package's generation: a token at a time."""
    room = model.config.max_length - len(prompt)
    for token in generate(model, params, [prompt], room, Sampling(temperature), key):
        yield token.tolist(), 0


Way = Callable[[list[int], Array], Iterator[tuple[list[int], int]]]


class Measured(NamedTuple):
    """One continuation: its tokens, and the time of the tokens after the first yield."""

    tokens: list[int]
    passes: int
    accepted: int  # drafted tokens
    seconds: float  # for each token
    cpu_seconds: float


def measure(way: Way, prompt: list[int], count: int, key: Array) -> Measured:
    """Continues the prompt by `count` tokens or a few more."""
    steps = way(prompt, key)
    tokens = [*next(steps)[0]]
    first, passes, accepted = len(tokens), 0, 0
    wall, cpu = time.perf_counter(), time.process_time()
    while len(tokens) < count:
        new, drafted = next(steps)
        tokens += new
        passes, accepted = passes + 1, accepted + drafted
    timed = len(tokens) - first
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Measured(tokens, passes, accepted, wall / timed, cpu / timed)


def compare(
    ways: dict[str, Way], prompts: list[list[int]], count: int, drafts: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """A line for each way, with its speed-up over the first; the ways take turns at each prompt.

    Args:
      count: how many tokens to add to a prompt.
      drafts: how many tokens a way drafts.
    """
    measured: dict[str, list[Measured]] = {name: [] for name in ways}
    for way in ways.values():  # compiles
        measure(way, prompts[0], count, jax.random.key(0))
    for n, prompt in enumerate(prompts):
        for name, way in ways.items():
            measured[name].append(measure(way, prompt, count, jax.random.key(n)))
    base = measured[next(iter(ways))]
    for name, each in measured.items():
        line: dict[str, Any] = {
            "way": name,
            "tokens_per_second": 1 / statistics.median(x.seconds for x in each),
            "speed_up": statistics.median(
                b.seconds / x.seconds for b, x in zip(base, each, strict=True)
            ),
            "cpu_speed_up": sum(x.cpu_seconds for x in base) / sum(x.cpu_seconds for x in each),
            "same": statistics.mean(
                b.tokens[:count] == x.tokens[:count] for b, x in zip(base, each, strict=True)
            ),
        }
        if name in drafts:
            k, accepted = drafts[name], sum(x.accepted for x in each)
            passes = sum(x.passes for x in each)
            line["tokens_per_pass"] = 1 + accepted / passes
            line["pass_cost"] = line["tokens_per_pass"] / line["cpu_speed_up"]
            line["acceptance"] = acceptance(accepted / passes, k)
        yield line


def acceptance(accepted: float, k: int) -> float:
    """The probability a at which `accepted` of k drafted tokens are accepted on average.

    On average a + a^2 + ... + a^k are accepted, because a token counts only after all before it.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**n for n in range(1, k + 1)) < accepted else (low, a)
    return low


def ways_of(
    model: LanguageModel, params: dict, weights: list[Weights], temperature: float
) -> tuple[dict[str, Way], dict[str, int]]:
    """The ways that the flags ask for, by name, and how many tokens each of them drafts."""
    ways: dict[str, Way] = {}
    drafts: dict[str, int] = {}
    ways["generate"] = partial(by_generate, model, params, temperature)
    for k in _DRAFT_TOKENS.value:
        ways[f"plain, {k + 1} a program"] = partial(
            plainly, model, params, weights, k + 1, temperature
        )
        for draft in _DRAFTS.value:
            for steps in _DRAFT_STEPS.value:
                name = f"{draft}, {steps} steps, {k} tokens"
                drafter, drafts[name] = drafter_of(model, draft, steps, k), k
                ways[name] = partial(by_drafts, model, params, weights, drafter, temperature)
    return ways, drafts


def main() -> None:
    """The command."""
    workdir = flag_values.parse_folder(_WORKDIR, "speculation")
    corpus = load_corpus(workdir)
    run = load_run(
        workdir,
        corpus.tokenizer.vocab_size,
        batch_size=1,
        grids=[(_NUM_STEPS.value, None)],
        methods=("extend", "empty_cache"),
    ).at_depth(_NUM_STEPS.value)
    model, length = run.placed.model, _PROMPT_TOKENS.value
    room = model.config.max_length - length - max(_DRAFT_TOKENS.value) - 1
    if _MAX_TOKENS.value > room:
        raise InputError(f"--max_tokens={_MAX_TOKENS.value}: {room} fit after the prompt")
    documents = corpus.parts[0].validation
    text = np.concatenate([documents[n] for n in range(len(documents))])
    starts = np.linspace(0, len(text) - length, _TEXTS.value, dtype=int)
    prompts = [text[n : n + length].tolist() for n in starts]
    with run.placed.context():
        weights = make_weights_by_step(model, run.params)
        for temperature in _TEMPERATURES.value:
            ways, drafts = ways_of(model, run.params, weights, temperature)
            for line in compare(ways, prompts, _MAX_TOKENS.value, drafts):
                rounded = {k: round(x, 3) if isinstance(x, float) else x for k, x in line.items()}
                print(json.dumps({"temperature": temperature, **rounded}), flush=True)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
