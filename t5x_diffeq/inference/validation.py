"""The loss of a run on its validation split, and what it means on a grid that wasn't trained.

W(t) is trained only at the nodes of the trained grids. Between the nodes it is noise if e(t) is
made of sinusoids of 1000 t, and close to its values at the nodes if e(t) is made of a few
polynomials.
"""

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.batches import eval_batches
from t5x_diffeq.data.corpus import Corpus
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.model.adaptive import Adaptive
from t5x_diffeq.model.ode.sources import source_of
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


def is_trained_grid(config: Config, scheme: str, num_steps: int | None) -> bool:
    """Whether the run of this config was trained with so many steps of the scheme.

    An adaptive solver, which has no number of steps, is never what a run was trained with.
    """
    trained = {config.model.num_steps, *config.train.depths}
    return scheme == config.model.scheme and num_steps in trained


def describe_trained_grids(config: Config) -> str:
    """`6 steps of euler`; `2, 4 and 12 steps of lie_trotter`."""
    *others, last = sorted({config.model.num_steps, *config.train.depths})
    steps = f"{', '.join(map(str, others))} and {last}" if others else f"{last}"
    return f"{steps} steps of {config.model.scheme}"


def is_smooth(config: Config) -> bool:
    """Whether the run's source says that W(t) means something on other grids, too."""
    return source_of(config.model).is_smooth()


def off_grid_warning(config: Config) -> str:
    """A warning about losses on grids that the model wasn't trained on."""
    return (
        f"the model was trained only with {describe_trained_grids(config)}, so W(t) is learned "
        "only at the times of that grid: a loss on another grid says little about the model; for a "
        "model that works on many grids, train the variant :smooth (configs/tiny.py:smooth), or "
        "with several train.depths (docs/depth.md)"
    )
