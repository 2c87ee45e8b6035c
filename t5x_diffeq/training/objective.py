"""What an optimizer step minimises: the mean over its depths of losses, divergences and penalties.

Each depth counts by the rows that it reads, so that all tokens that are read count alike: few rows
with the weight of many would make the gradient noisy. What is reported is the plain mean over the
depths. Both are of means over the tokens that have a loss in a depth's rows, whatever the number of
microbatches; only a block's running cost is a mean of the microbatches' own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Places, State, Weights
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.models.sub_fields import has_cost
from t5x_diffeq.ode.running_cost import RunningCosts
from t5x_diffeq.runtime.config import TrainKeys
from t5x_diffeq.training.depths import Rows, rows_of_depths
from t5x_diffeq.training.losses import StateAndHead, distillation_losses, token_losses

Batch = dict[str, jax.Array]
Params = dict
Means = dict[str, Array]  # what is reported of a batch: means over its tokens, by name


class Pass(NamedTuple):
    """A forward pass of an optimizer step.

    Attributes:
      model: the model on the pass's grid.
      rows: the rows of a batch, or of each microbatch, that it reads.
      share: its share in what is minimised.
      learns: the weight of what the largest depth predicts; 0: it doesn't learn from that.
    """

    model: LanguageModel
    rows: Rows
    share: float
    learns: float


class PassEnd(NamedTuple):
    """Where a pass ends.

    Attributes:
      y: the state at t = 1, normalised.
      head: the head's vectors.
      costs: the running costs.
    """

    y: State
    head: Float[Array, "V D"]
    costs: RunningCosts


class BatchLosses(NamedTuple):
    """What a batch costs.

    Attributes:
      losses: -log p of each target.
      normalisers: log of the softmax's normaliser at each token.
      divergences: KL divergence from the teacher's prediction; None without a teacher.
    """

    losses: Float[Array, "B L"]
    normalisers: Float[Array, "B L"]
    divergences: Float[Array, "B L"] | None


def passes_of(model: LanguageModel, depths: tuple[int, ...] | None, keys: TrainKeys) -> list[Pass]:
    """The passes of an optimizer step at these numbers of solver steps, the largest last.

    None is the model's own.
    """
    models = [model.at_depth(n) for n in sorted(depths or ())] or [model]
    rows = rows_of_depths(keys.depths_rows, len(models))
    read = sum(1 / each.every for each in rows)
    shares = [1 / each.every / read for each in rows]
    learn = [keys.depths_distill] * (len(models) - 1) + [0.0]
    return [Pass(*each) for each in zip(models, rows, shares, learn, strict=True)]


def count_tokens(
    passes: list[Pass], mask: Float[Array, "B L"], microbatches: int
) -> list[Float[Array, ""]]:
    """For each pass, the tokens that have a loss in the rows that it reads of a batch.

    At least 1: a batch of prompts alone has no loss.
    """
    of_each = [jax.vmap(each.rows.take)(split_rows(mask, microbatches)).sum() for each in passes]
    return [jnp.maximum(tokens, 1) for tokens in of_each]


def split_rows(x: Array, microbatches: int) -> Array:
    """`[B, ...]` as `[M, B / M, ...]`: row r goes to microbatch r modulo M.

    So every device keeps its own rows.
    """
    return x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)


def objective(
    passes: list[Pass],
    params: Params,
    weights: list[Weights],
    batch: Batch,
    tokens: list[Float[Array, ""]],
    keys: TrainKeys,
    key: Array | None,
    teacher: StateAndHead | None = None,
) -> tuple[Float[Array, ""], Means]:
    """What is minimised, and the means that are reported; of a microbatch, its part of them.

    Args:
      passes: the passes of the step.
      params: the parameters, of which the source's are not needed.
      weights: those of each pass.
      batch: the batch or a microbatch.
      tokens: what `count_tokens` returns for the whole batch.
      keys: `config.train`.
      key: the dropout key.
      teacher: the last state of these rows, and the head, of a model that doesn't train.
    """
    batches = [jax.tree.map(each.rows.take, batch) for each in passes]

    def run(i: int) -> PassEnd:
        velocity = keys.velocity_penalty > 0
        return end_of_pass(passes[i].model, params, batches[i], weights[i], key, velocity)

    largest = run(-1)
    total, reported = jnp.zeros(()), dict[str, list[Array]]()
    for i, (model, rows, share, learns) in enumerate(passes):
        end = largest if i == len(passes) - 1 else run(i)
        theirs = (largest.y, largest.head) if learns else teacher
        theirs = theirs and (rows.take(theirs[0]), theirs[1])
        found = _losses_at(model, end, batches[i], keys.loss_chunk, theirs)
        means = _means_of(found, end.costs, batches[i]["mask"], tokens[i])
        if has_cost(model.config):
            means["running_cost"] = end.costs.block / keys.microbatches
        total += share * _minimised(means, learns or keys.distill_weight, keys)
        for name, mean in means.items():
            reported.setdefault(name, []).append(mean)
    del reported["z"]
    return total, {name: sum(x, start=jnp.zeros(())) / len(x) for name, x in reported.items()}


def _means_of(
    found: BatchLosses, costs: RunningCosts, mask: Array, tokens: Float[Array, ""]
) -> Means:
    """The means over the tokens that have a loss; of a microbatch, its part of them."""
    of_tokens = {
        "loss": found.losses,
        "z": jnp.square(found.normalisers),
        "distillation": found.divergences,
        "velocity": costs.velocity,
    }
    return {name: (x * mask).sum() / tokens for name, x in of_tokens.items() if x is not None}


def _minimised(means: Means, learns: float, keys: TrainKeys) -> Float[Array, ""]:
    """What is minimised of a pass; `learns` is the weight of its teacher, if it has one."""
    loss = means["loss"]
    if "distillation" in means:
        loss = (1 - learns) * loss + learns * means["distillation"]
    penalties = keys.z_loss * means["z"] + keys.velocity_penalty * means.get("velocity", 0)
    return loss + means.get("running_cost", 0) + penalties


def places_of(batch: Batch) -> Places | None:
    """The positions of a batch's tokens; None if each row is one document."""
    return Places(batch["positions"], batch["segments"]) if "segments" in batch else None


def batch_losses(model: LanguageModel, params: Params, batch: Batch, chunk: int) -> BatchLosses:
    """The losses of a batch, without dropout.

    Args:
      model: the model.
      params: its parameters.
      batch: the batch.
      chunk: tokens per device whose logits exist at once.
    """
    return _losses_at(model, end_of_pass(model, params, batch), batch, chunk)


def _losses_at(
    model: LanguageModel,
    end: PassEnd,
    batch: Batch,
    chunk: int,
    teacher: StateAndHead | None = None,
) -> BatchLosses:
    """The losses where a pass ends, and the divergences from a teacher's predictions."""
    sizes = {"vocab_size": model.config.vocab_size, "chunk": chunk}
    with jax.named_scope("loss"):
        if teacher is None:
            found = token_losses(end.y, end.head, batch["targets"], **sizes)
            return BatchLosses(*found, divergences=None)
        student = end.y, end.head
        return BatchLosses(*distillation_losses(student, teacher, batch["targets"], **sizes))


def end_of_pass(
    model: LanguageModel,
    params: Params,
    batch: Batch,
    weights: Weights | None = None,
    key: Array | None = None,
    velocity: bool = False,
) -> PassEnd:
    """Where the model's pass over a batch ends; with dropout, if a key is given.

    Args:
      model: the model.
      params: its parameters; if weights are given, the source's are not needed.
      batch: the batch.
      weights: the weights of the pass; None: made from the parameters.
      key: the dropout key.
      velocity: whether tokens are charged for their velocity.
    """
    rngs = None if key is None or model.config.dropout_rate == 0 else {"dropout": key}
    y, head, costs = nn.apply(LanguageModel.state_and_head, model)(
        {"params": params},
        batch["inputs"],
        weights,
        places_of(batch),
        deterministic=rngs is None,
        velocity=velocity,
        rngs=rngs,
    )
    # Else the head's gradient, not yet summed over devices, is kept until the weights' is there.
    y, head = jax.lax.optimization_barrier((y, head))
    return PassEnd(y, head, costs)
