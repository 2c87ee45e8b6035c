"""What an optimizer step minimises: the mean over its depths of a weighted sum of terms.

The weight of a depth is the number of rows that it reads, so all tokens that are read have the same
weight: few rows with the weight of many would make the gradient noisy. What is reported is the
plain mean over the depths. In both, the value of a depth is a mean over the tokens that have a loss
in its rows.

The terms are in `terms.py`, or named by `train.terms`.
"""

from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from t5x_diffeq.config.config import TrainKeys
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Places, State, Weights
from t5x_diffeq.model.ode.running_cost import Rate
from t5x_diffeq.training.depths import DepthRows, rows_of_depths
from t5x_diffeq.training.losses import StateAndHead, losses_and_choices, sum_of_terms
from t5x_diffeq.training.terms import logits_terms, states_terms

Batch = dict[str, jax.Array]
Params = dict
BatchMetrics = dict[str, Array]  # what is reported of a batch: means over its tokens, by name


class Pass(NamedTuple):
    """A forward pass of an optimizer step."""

    model: LanguageModel  # the model on the pass's grid
    rows: DepthRows  # the rows of a batch, or of each microbatch, that it reads
    share: float  # the pass's weight in what is minimised; all sum to 1
    learns: float  # the weight of distilling the largest depth's predictions; 0: no distillation


class PassEnd(NamedTuple):
    """Where a pass ends: the normalised state at t = 1, the head's vectors, and its costs."""

    y: State
    head: Float[Array, "V D"]
    costs: list[Float[Array, "B L"]]  # the mean over depth of each rate


def passes_of(
    model: LanguageModel, depths: tuple[int, ...] | None, train_config: TrainKeys
) -> list[Pass]:
    """The passes of an optimizer step at these numbers of solver steps, the largest last.

    If `depths` is None, the only pass is at the model's own number of steps.
    """
    models = [model.at_depth(n) for n in sorted(depths or ())] or [model]
    rows = rows_of_depths(train_config.depths_rows, len(models))
    read = sum(1 / each.every for each in rows)
    shares = [1 / each.every / read for each in rows]
    learn = [train_config.depths_distill] * (len(models) - 1) + [0.0]
    return [Pass(*each) for each in zip(models, rows, shares, learn, strict=True)]


def count_tokens(
    passes: list[Pass], mask: Float[Array, "B L"], microbatches: int
) -> list[Float[Array, ""]]:
    """For each pass, the number of tokens with a loss in the rows of a batch that it reads.

    The number is at least 1, because it is a divisor, and a batch of prompts has no such token.
    """
    counts = [jax.vmap(each.rows.take)(split_rows(mask, microbatches)).sum() for each in passes]
    return [jnp.maximum(tokens, 1) for tokens in counts]


def split_rows(x: Array, microbatches: int) -> Array:
    """`[B, ...]` as `[M, B / M, ...]`: row r goes to microbatch r modulo M.

    So every device keeps its own rows. A reshape to `[M, B / M, ...]` would gather the batch.
    """
    return x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)


def objective(
    passes: list[Pass],
    params: Params,
    weights: list[Weights],
    batch: Batch,
    tokens: list[Float[Array, ""]],
    train_config: TrainKeys,
    key: Array | None,
    teacher: StateAndHead | None = None,
) -> tuple[Float[Array, ""], BatchMetrics]:
    """The minimised loss and the reported means; for a microbatch, its share of both.

    Args:
      params: the parameters; the source's may be left out.
      weights: the weights of each pass.
      batch: rows of the batch.
      tokens: what `count_tokens` returns for the whole batch.
      train_config: `PlacedModel.train_config`.
      key: the dropout key; None: no dropout.
      teacher: the state at t = 1 of these rows, and the head, of a model that doesn't train.
    """
    chunk = train_config.loss_chunk
    assert chunk is not None  # `PlacedModel.train_config` has chosen it
    batches = [jax.tree.map(each.rows.take, batch) for each in passes]
    of_states = states_terms(train_config)
    rates = tuple(term.rate for term in of_states)
    ends = [
        end_of_pass(each.model, params, rows, w, key, rates)
        for each, rows, w in zip(passes, batches, weights, strict=True)
    ]
    largest = ends[-1]
    total, reported = jnp.zeros(()), defaultdict[str, list[Array]](list)
    for each, rows, end, count in zip(passes, batches, ends, tokens, strict=True):
        teacher_outputs = (largest.y, largest.head) if each.learns else teacher
        if teacher_outputs:
            teacher_outputs = each.rows.take(teacher_outputs[0]), teacher_outputs[1]
        share_of_teacher = each.learns or (train_config.distill_weight if teacher else None)
        of_logits = logits_terms(train_config, share_of_teacher)
        with jax.named_scope("loss"):
            charged, values = sum_of_terms(
                of_logits,
                (end.y, end.head),
                teacher_outputs,
                rows["targets"],
                # The count is the whole batch's, so the parts of its microbatches add up.
                each.share * rows["mask"] / count,
                vocab_size=each.model.config.vocab_size,
                chunk=chunk,
            )
        total += charged
        for term, by_token in zip((*of_logits, *of_states), (*values, *end.costs), strict=True):
            reported[term.name].append((by_token * rows["mask"]).sum() / count)
        for term in of_states:
            total += each.share * term.weight * reported[term.name][-1]
    return total, {name: sum(x, start=jnp.zeros(())) / len(x) for name, x in reported.items()}


def places_of(batch: Batch) -> Places | None:
    """The positions of a batch's tokens; None if each row is one document."""
    return Places(batch["positions"], batch["segments"]) if "segments" in batch else None


def batch_losses(
    model: LanguageModel, params: Params, batch: Batch, chunk: int
) -> Float[Array, "B L"]:
    """-log p of each target of a batch, without dropout and without a gradient."""
    end = end_of_pass(model, params, batch)
    sizes = {"vocab_size": model.config.vocab_size, "chunk": chunk}
    return losses_and_choices(end.y, end.head, batch["targets"], **sizes)[0]


def end_of_pass(
    model: LanguageModel,
    params: Params,
    batch: Batch,
    weights: Weights | None = None,
    key: Array | None = None,
    rates: tuple[Rate, ...] = (),
) -> PassEnd:
    """The end of the model's pass over a batch; with dropout if a key is given.

    If `weights` is None, they are made from `params`. Otherwise `params` may lack the source's.
    """
    # The architecture's block has only the dropout of `model.dropout_rate`; a plug-in may have any.
    draws = model.config.dropout_rate > 0 or model.config.block is not None
    rngs = {"dropout": key} if draws and key is not None else None
    y, head, costs = nn.apply(LanguageModel.state_and_head, model)(
        {"params": params},
        batch["inputs"],
        weights,
        places_of(batch),
        deterministic=rngs is None,
        rates=rates,
        rngs=rngs,
    )
    # Without the barrier, XLA keeps each device's gradient of the head until the gradient of the
    # weights is there, and only then sums it over the devices.
    y, head = jax.lax.optimization_barrier((y, head))
    return PassEnd(y, head, costs)
