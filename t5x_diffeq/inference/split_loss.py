"""Loss, perplexity and bits per byte of a run on its validation split."""

from t5x_diffeq.data.batches import eval_batches
from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.model.adaptive import Adaptive
from t5x_diffeq.training.evaluation import evaluate_loss, make_adaptive_eval_step, make_eval_step
from t5x_diffeq.training.load import Run


def evaluate_split(
    run: Run,
    corpus: Corpus,
    batch_size: int,
    limit: int | None = None,
    adaptive: Adaptive | None = None,
) -> dict[str, float]:
    """Loss, perplexity, bits per byte and number of tokens on the validation split.

    There are no bits per byte if the bytes of tokens aren't known (see `data.token_bytes`).

    Args:
      run: the model, on its grid.
      corpus: the run's data.
      batch_size: sequences per batch, rounded up to a multiple of the batch shards.
      limit: only the first `limit` batches; None for the whole split.
      adaptive: a solver that chooses its own steps; None for the run's grid and scheme.
    """
    placed, parts = run.placed, eval_examples(run.placed.config.data, corpus)
    rows = placed.eval_batch_size(min(batch_size, sum(map(len, parts))))
    batches = eval_batches(parts, rows, placed.batch_sharding, limit)
    with placed.context():
        eval_step = make_eval_step(placed)
        if adaptive:
            eval_step = make_adaptive_eval_step(placed, adaptive)
        return evaluate_loss(eval_step, run.params, batches)
