"""Figures of a trained run, which a notebook shows: `run.plot()`, `run.plot.weights()`."""

import importlib
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from t5x_diffeq.analysis.weight_paths import make_weight_paths
from t5x_diffeq.system.extras import need_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from t5x_diffeq.inference.trained_run import TrainedRun


def import_plots(asked: str, module: str) -> ModuleType:
    """A module of `analysis` that draws.

    Args:
      asked: what needs it, for the message.
      module: the module's name.

    Raises:
      InputError: if matplotlib isn't installed.
    """
    need_package("matplotlib", asked, "leave it out")
    return importlib.import_module(f"t5x_diffeq.analysis.{module}")


class Figures:
    """Draws a run; each method returns a matplotlib figure, whose `savefig` writes it.

    Each raises an InputError if matplotlib isn't installed.
    """

    def __init__(self, run: "TrainedRun"):
        self._run = run

    def __call__(self) -> "Figure":
        """The training and validation losses over optimizer steps."""
        run_plots = import_plots("run.plot()", "run_plots")
        return _shown_in_notebooks(run_plots.losses_over_steps(self._run.metric_lines()))

    def weights(self) -> "Figure":
        """W(t) at the grid's nodes: the path of each kernel, its norm, and its direction."""
        plots, placed = import_plots("run.plot.weights()", "depth_plots"), self._run.run.placed
        with placed.context():
            paths = make_weight_paths(placed.model, placed.mesh)(self._run.run.params)
        return _shown_in_notebooks(plots.weight_paths(paths))

    def states(self, text: str) -> "Figure":
        """|y(t)| and |dy/dt| of each token of a text.

        Raises:
          InputError: if the text is empty, or longer than the model's length.
        """
        run_plots = import_plots("run.plot.states()", "run_plots")
        y = self._run.trajectory(text)
        return _shown_in_notebooks(run_plots.states_over_time(np.asarray(y), y.t, y.tokens))

    def depths(
        self,
        num_steps: Sequence[int] | None = None,
        schemes: Sequence[str] | None = None,
        limit: int | None = 4,
    ) -> "Figure":
        """The perplexity on validation against the number of solver steps, a line per scheme.

        Args:
          num_steps: numbers of steps; None for half, once, twice and four times the run's own.
          schemes: schemes; None for the run's own.
          limit: only the first `limit` batches; None for the whole split.

        Raises:
          InputError: if the weights don't exist on one of the grids.
        """
        plots, model = import_plots("run.plot.depths()", "depth_plots"), self._run.config.model
        own = model.num_steps
        counts = num_steps or sorted({max(own // 2, 1), own, 2 * own, 4 * own})
        results = []
        for scheme in schemes or [model.scheme]:
            for count in counts:
                perplexity = self._run.at_depth(count, scheme).evaluate(limit=limit)["perplexity"]
                results.append(
                    {"scheme": scheme, "num_steps": count, "eval/perplexity": perplexity}
                )
        return _shown_in_notebooks(plots.perplexity_over_depth(results, (model.scheme, own)))


def _shown_in_notebooks(figure: "Figure") -> "Figure":
    """The figure, which IPython shows without pyplot."""
    render_image = import_plots("a figure", "figures").render_image
    figure._repr_png_ = partial(render_image, figure)  # type: ignore[attr-defined]
    return figure
