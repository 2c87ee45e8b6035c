"""Log-likelihoods of given tokens, and whether greedy decoding would produce them.

Sequences are padded to one of a few lengths and batched with others of that padded length, so that
few programs are compiled and a score doesn't depend on the other sequences of its batch.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jaxtyping import Array

from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Tokens, Weights
from t5x_diffeq.system.console import Progress
from t5x_diffeq.training.losses import losses_and_choices
from t5x_diffeq.training.placed_model import PlacedModel

_SHORTEST = 128  # padded lengths are this one, doubled up to the model's length


@dataclass(frozen=True)
class Sequel:
    """Tokens, of which the last `count` are scored given the tokens before them."""

    tokens: list[int]  # at most one token more than the model's length
    count: int  # fewer than there are tokens


class Score(NamedTuple):
    """The score of a sequel."""

    loglikelihood: float  # sum of log p of the scored tokens, in nats
    greedy: bool  # whether each of them is the likeliest token at its position


@partial(jax.jit, static_argnames="model")
def _make_pass_weights(model: LanguageModel, params: dict) -> Weights:
    return nn.apply(LanguageModel.merged_weights, model)({"params": params})


@partial(jax.jit, static_argnames=("model", "chunk"))
def _score(
    model: LanguageModel,
    chunk: int,
    params: dict,
    weights: Weights,
    inputs: Tokens,
    targets: Tokens,
) -> tuple[Array, Array]:
    """Losses and likeliest tokens, `[B, L]`, replicated on every process."""
    y = nn.apply(LanguageModel.hidden, model)({"params": params}, inputs, weights)
    head = nn.apply(LanguageModel.head_vectors, model)({"params": params})
    vocab_size = model.config.vocab_size
    losses, choices = losses_and_choices(y, head, targets, vocab_size=vocab_size, chunk=chunk)
    replicate = partial(nn.with_logical_constraint, logical_axis_resources=(None, None))
    return replicate(losses), replicate(choices)


class Scorer:
    """Scores sequels on a model's devices.

    Args:
      params: the model's parameters, sharded as `placed` says.
      batch_size: sequences of the model's full length per batch; of shorter sequences,
        proportionally more.
    """

    def __init__(self, placed: PlacedModel, params: dict, batch_size: int):
        self.placed, self.batch_size = placed.with_whole_rows(), batch_size
        with self.placed.context():
            # Once, because all batches read the same weights.
            weights = _make_pass_weights(placed.model, params)
        chunk = placed.loss_chunk
        self.score = partial(_score, placed.model, chunk, params, weights)

    def __call__(self, sequels: Sequence[Sequel]) -> list[Score]:
        """The score of each sequel, summed in float64."""
        scores: dict[int, Score] = {}
        pending = None
        with Progress("scored", len(sequels), "sequences") as progress, self.placed.context():
            for numbers, inputs, targets in self.batches(sequels):
                dispatched = numbers, self.score(inputs, targets)
                if pending:
                    _collect(sequels, scores, *pending)  # while the next batch runs
                    progress.update(len(scores))
                pending = dispatched
            if pending:
                _collect(sequels, scores, *pending)
        return [scores[number] for number in range(len(sequels))]

    def batches(self, sequels: Sequence[Sequel]) -> Iterator[tuple[list[int], Tokens, Tokens]]:
        """Batches, longest first: the sequels' numbers, their inputs and their targets."""
        limit = self.placed.model.config.max_length
        by_length = defaultdict(list)
        for number, sequel in enumerate(sequels):
            by_length[padded_length(len(sequel.tokens) - 1, limit)].append(number)
        for length in sorted(by_length, reverse=True):
            numbers = by_length[length]
            most = self.batch_size * limit // length
            rows = self.placed.eval_batch_size(min(len(numbers), most))
            for first in range(0, len(numbers), rows):
                chosen = numbers[first : first + rows]
                inputs, targets = self._shard_rows(
                    [sequels[n].tokens for n in chosen], rows, length
                )
                yield chosen, inputs, targets

    def _shard_rows(self, rows: list[list[int]], count: int, length: int) -> list[Array]:
        """Inputs and targets, sharded over the mesh and zero-padded to `[count, length]`."""
        arrays = np.zeros((2, count, length), np.int32)
        for number, tokens in enumerate(rows):
            arrays[0, number, : len(tokens) - 1] = tokens[:-1]
            arrays[1, number, : len(tokens) - 1] = tokens[1:]
        return [
            jax.make_array_from_callback(array.shape, self.placed.batch_sharding, array.__getitem__)
            for array in arrays
        ]


def padded_length(length: int, limit: int) -> int:
    """The shortest padded length that holds `length` tokens."""
    padded = _SHORTEST
    while padded < length:
        padded *= 2
    return min(padded, limit)


def _collect(
    sequels: Sequence[Sequel],
    scores: dict[int, Score],
    numbers: list[int],
    outputs: tuple[Array, Array],
) -> None:
    losses, best = map(np.asarray, outputs)
    for row, number in enumerate(numbers):
        tokens, count = sequels[number].tokens, sequels[number].count
        last = len(tokens) - 1
        judged = slice(last - count, last)
        total = -float(losses[row, judged].sum(dtype=np.float64))
        greedy = np.array_equal(best[row, judged], tokens[len(tokens) - count :])
        scores[number] = Score(total, greedy)
