"""Computes the loss, the perplexity and the bits per byte of a split."""

from collections.abc import Callable, Iterator
from functools import partial
from math import exp, log
from typing import NamedTuple

import jax
from clu import metrics as clu_metrics
from jaxtyping import Array, Float

from t5x_diffeq.model.adaptive import Adaptive, solve_adaptively
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.errors import InputError, RunError
from t5x_diffeq.training.losses import losses_and_choices
from t5x_diffeq.training.objective import Batch, batch_losses, places_of
from t5x_diffeq.training.placed_model import PlacedModel


class EvalMetrics(NamedTuple):
    """The sums of a batch, over the tokens that its mask counts."""

    loss: clu_metrics.Average  # the sum of their losses, and their number
    bytes: jax.Array | None  # the bytes of these tokens' text; None if the batch lacks them

    @classmethod
    def of(cls, losses: Float[Array, "B L"], batch: Batch) -> "EvalMetrics":
        """The metrics of a batch whose tokens have these losses."""
        loss = clu_metrics.Average.from_model_output(losses, mask=batch["mask"])
        return cls(loss, batch["bytes"].sum() if "bytes" in batch else None)


def make_eval_step(placed: PlacedModel) -> Callable[[dict, Batch], EvalMetrics]:
    """The jitted function from parameters and a batch to the batch's sums."""
    return partial(_eval_step, placed.model, placed.loss_chunk)


@partial(jax.jit, static_argnums=(0, 1))
def _eval_step(model: LanguageModel, chunk: int, params: dict, batch: Batch) -> EvalMetrics:
    return EvalMetrics.of(batch_losses(model, params, batch, chunk), batch)


def make_adaptive_eval_step(
    placed: PlacedModel, adaptive: Adaptive
) -> Callable[[dict, Batch], EvalMetrics]:
    """Like `make_eval_step`, with a diffrax solver instead of the grid.

    Raises:
      RunError: from the returned function, if the solver gives up.
    """
    model, chunk = placed.model, placed.loss_chunk

    @jax.jit
    def solve_batch(params: dict, batch: Batch) -> tuple[EvalMetrics, Array, Array]:
        solution = solve_adaptively(model, params, batch["inputs"], adaptive, places_of(batch))
        with_params = model.bind({"params": params})
        y, head = with_params.normalise(solution.y), with_params.head_vectors()
        sizes = {"vocab_size": model.config.vocab_size, "chunk": chunk}
        losses, _ = losses_and_choices(y, head, batch["targets"], **sizes)
        return EvalMetrics.of(losses, batch), solution.steps, solution.reached

    def eval_step(params: dict, batch: Batch) -> EvalMetrics:
        metrics, steps, reached = solve_batch(params, batch)
        if not reached:
            raise RunError(
                f"{adaptive.solver} gave up after {int(steps)} steps before t = 1: W(t) "
                "is too rough between the nodes that the model was trained at; raise --rtol, or "
                "take a fixed scheme"
            )
        return metrics

    return eval_step


def evaluate_loss(
    eval_step: Callable[[dict, Batch], EvalMetrics], params: dict, batches: Iterator[Batch]
) -> dict[str, float]:
    """Mean next-token cross entropy in nats, its exponential, bits per byte, and number of tokens.

    The host adds the sums of batches in float64, so that the result hardly depends on how the split
    was divided into batches. Only tokens that the masks count are in the sums. Bits per byte are
    included if the batches hold the bytes of their tokens (see `data.token_bytes`).

    Raises:
      InputError: if the masks count no token.
    """
    sums = (0.0, 0, 0)
    # The host adds up the sums of one batch while the devices compute the next.
    pending = eval_step(params, next(batches))
    for batch in batches:
        dispatched = eval_step(params, batch)
        sums = _add(sums, pending)
        pending = dispatched
    total, tokens, size = _add(sums, pending)
    if not tokens:
        raise InputError(
            "no token of the evaluated batches has a loss: with data.loss_on=completion they may "
            "hold only prompts; raise train.eval_batches or give more validation text"
        )
    loss = total / tokens
    per_byte = {"bits_per_byte": total / log(2) / size} if size else {}
    perplexity = exp(min(loss, 700))  # exp(710) is beyond float64
    return {"loss": loss, "perplexity": perplexity, **per_byte, "tokens": tokens}


def _add(sums: tuple[float, int, int], metrics: EvalMetrics) -> tuple[float, int, int]:
    """The sums of losses, tokens and bytes, with another batch added."""
    size = 0 if metrics.bytes is None else int(metrics.bytes)
    total, tokens = float(metrics.loss.total), int(metrics.loss.count)
    return sums[0] + total, sums[1] + tokens, sums[2] + size
