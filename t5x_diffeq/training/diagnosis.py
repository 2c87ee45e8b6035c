"""Why the loss or the gradient of an optimizer step isn't finite: which parameter, which step.

The train step leaves out an update that isn't finite, so the state is still the one to look at.
"""

from math import isfinite

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict

from t5x_diffeq.models.language_model import LanguageModel, in_one_document
from t5x_diffeq.training.gradient import make_gradient
from t5x_diffeq.training.objective import Batch, Params, places_of
from t5x_diffeq.training.setup import Setup
from t5x_diffeq.training.watch import sizes


def find_cause(setup: Setup, params: Params, batch: Batch) -> str | None:
    """Where values that aren't finite first appear; None if they don't appear again.

    Looks at the parameters, then at f, g and the state in each solver step, then at the gradient.
    Compiles programs of its own, and every process must call it.

    Args:
      setup: the run's setup.
      params: the parameters.
      batch: the batch of the step.
    """
    if found := _leaves_not_finite(params):
        return f"{found} of the parameters isn't finite"
    parts = setup.config.train.microbatches  # a whole batch may not fit
    for n in range(parts):
        rows = {name: x[n::parts] for name, x in batch.items()}
        if found := _solver_step_not_finite(setup, params, rows):
            return found
    if setup.config.train.distill_from:
        return None  # the gradient takes the teacher's parameters, too
    of_batch = make_gradient(setup.model, setup.trains, setup.config.train)
    gradient = jax.jit(lambda *given: of_batch(*given).gradient)(params, batch, setup.dropout_key)
    found = _leaves_not_finite(gradient)
    return f"all states are finite, but the gradient of {found} isn't" if found else None


def _leaves_not_finite(tree: Params) -> str | None:
    """The leaf that isn't finite, or how many of all."""
    are_finite = jax.jit(lambda leaves: jax.tree.map(lambda x: jnp.isfinite(x).all(), leaves))
    found = flatten_dict(jax.device_get(are_finite(tree)), sep="/")
    names = [name for name, is_finite in found.items() if not is_finite]
    if len(names) > 1:
        return f"{names[0]} (and {len(names) - 1} more of {len(found)})"
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
    names = {"f": "f (attention)", "g": "g (the MLP)", "state": "the state"}
    steps = model.config.num_steps
    for n in range(steps):
        for kind, value in (
            ("f", curves["f"][n]),
            ("g", curves["g"][n]),
            ("state", curves["state"][n + 1]),
        ):
            if not isfinite(value):
                return f"{names[kind]} isn't finite in solver step {n + 1} of {steps}"
    return None
