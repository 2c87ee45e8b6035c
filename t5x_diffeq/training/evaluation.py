"""Loss and perplexity over a split."""

from collections.abc import Callable, Iterator
from math import exp

from t5x_diffeq.training.step import Batch, EvalMetrics


def evaluate(
    eval_step: Callable[[dict, Batch], EvalMetrics], params: dict, batches: Iterator[Batch]
) -> dict[str, float]:
    """Mean next-token cross entropy in nats, its exponential, and the number of tokens.

    Sums over batches are taken in float64 on the host, so that the result does not depend on how
    the split was divided into batches.
    """
    total, tokens = 0.0, 0
    pending = None
    for batch in batches:
        dispatched = eval_step(params, batch)
        if pending is not None:
            total, tokens = total + float(pending.loss.total), tokens + int(pending.loss.count)
        pending = dispatched
    total, tokens = total + float(pending.loss.total), tokens + int(pending.loss.count)
    loss = total / tokens
    return {"loss": loss, "perplexity": exp(min(loss, 700)), "tokens": tokens}
