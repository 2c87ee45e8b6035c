"""Why the loss or the gradient of an optimizer step isn't finite: which parameter, which step.

The train step leaves that update out. The next step may already have changed the parameters
(`training/spike_hook.py` says so).
"""

from collections.abc import Sequence
from math import isfinite

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from t5x_diffeq.model.language_model import LanguageModel, in_one_document
from t5x_diffeq.system.errors import RunError
from t5x_diffeq.training.objective import Batch, Params, places_of
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.step import make_gradient
from t5x_diffeq.training.watch import sizes


def find_cause(setup: Setup, params: Params, batch: Batch) -> str | None:
    """Where values that aren't finite first appear; None if they don't appear again.

    Looks at the parameters, then at f, g and the state in each solver step, then at the gradient.
    Compiles programs of its own, and every process must call it.
    """
    if fault := _leaves_not_finite(params):
        return f"{fault} of the parameters isn't finite"
    parts = setup.config.train.microbatches  # a whole batch may not fit
    for n in range(parts):
        rows = {name: x[n::parts] for name, x in batch.items()}
        if fault := _solver_step_not_finite(setup, params, rows):
            return fault
    if setup.config.train.distill_from:
        return None  # the gradient takes the teacher's parameters, too
    of_batch = make_gradient(setup.model, setup.trains, setup.train_keys)
    gradient = jax.jit(lambda *given: of_batch(*given).gradient)(params, batch, setup.dropout_key)
    fault = _leaves_not_finite(gradient)
    return f"all states are finite, but the gradient of {fault} isn't" if fault else None


def _leaves_not_finite(tree: Params) -> str | None:
    """The leaf that isn't finite, or how many of all."""
    are_finite = jax.jit(lambda leaves: jax.tree.map(lambda x: jnp.isfinite(x).all(), leaves))
    leaves = flatten_dict(jax.device_get(are_finite(tree)), sep="/")
    names = [name for name, is_finite in leaves.items() if not is_finite]
    if len(names) > 1:
        return f"{names[0]} (and {len(names) - 1} more of {len(leaves)})"
    return names[0] if names else None


def _solver_step_not_finite(setup: Setup, params: Params, batch: Batch) -> str | None:
    """The first of f, g and the state that isn't finite, with its solver step."""
    model = setup.model

    @jax.jit
    def curves_of(params: Params, batch: Batch) -> dict:
        places = places_of(batch) or in_one_document(batch["inputs"])
        y = nn.apply(LanguageModel.embed, model)({"params": params}, batch["inputs"], places)
        weights = nn.apply(LanguageModel.weights, model)({"params": params})
        return sizes(model.config, weights, y, places)

    curves = {name: np.asarray(x) for name, x in jax.device_get(curves_of(params, batch)).items()}
    if not isfinite(curves["state"][0]):
        return "the embedded tokens aren't finite"
    steps = model.config.num_steps
    for n in range(steps):
        for name, value in (
            ("f (attention)", curves["f"][n]),
            ("g (the MLP)", curves["g"][n]),
            ("the state", curves["state"][n + 1]),
        ):
            if not isfinite(value):
                return f"{name} isn't finite in solver step {n + 1} of {steps}"
    return None


def not_finite_error(
    step: int, bad: Sequence[str], last_checkpoint: int | None, start: int, cause: str | None
) -> RunError:
    """The error that ends a run whose values are no longer finite; says what to try.

    Args:
      step: the optimizer step that the values belong to.
      bad: what is wrong: "loss is nan".
      last_checkpoint: the newest checkpoint that was saved, if any.
      start: the checkpoint that the run was resumed from; 0 for a new run.
      cause: where the first such value appears, if that was found.
    """
    what = f"at step {step} {' and '.join(bad)}{f': {cause}' if cause else ''}"
    if start and step == start + 1:
        return RunError(
            f"{what}, the first step after checkpoint {start} was restored: that checkpoint is "
            f"suspect; move checkpoints/{start} away, and the same command continues from an older "
            "one"
        )
    good = f"the last good checkpoint is {last_checkpoint}"
    if last_checkpoint is None:
        good = "no checkpoint was saved yet"
    return RunError(
        f"{what}; {good}, and this state was not saved; try a lower optimizer.learning_rate, a "
        "longer optimizer.warmup_fraction or a smaller optimizer.max_grad_norm in a new --workdir"
    )
