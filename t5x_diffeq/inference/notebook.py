"""What a notebook shows of a run: states and weights with labelled axes, and figures."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Float, Shaped

from t5x_diffeq.analysis.weight_paths import make_weight_paths
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.system.arguments import checked
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import AnyPath, write_whole
from t5x_diffeq.training.load import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MOST = 6  # times or tokens that are printed


class Trajectory(np.ndarray):
    """The states y(t) of a text's tokens: an array `[states, tokens, width]`.

    Slices of it, and results computed from it, are plain arrays without these attributes.
    """

    t: Float[np.ndarray, " states"] | None = None  # the times: 0, 1/N, ..., 1
    tokens: tuple[str, ...] = ()  # the text of each token

    @classmethod
    def of(
        cls,
        states: Shaped[np.ndarray, "states L D"],
        t: Float[np.ndarray, " states"],
        tokens: Sequence[str],
    ) -> "Trajectory":
        """The states with the times and the texts of the tokens that they belong to."""
        labelled = states.view(cls)
        labelled.t, labelled.tokens = t, tuple(tokens)
        return labelled

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __repr__(self) -> str:
        if self.t is None:
            return repr(np.asarray(self))
        states, length, width = self.shape
        return (
            f"y(t): [t {states}, token {length}, width {width}], {self.dtype}\n"
            f"  t      {_shorten([f'{time:.3g}' for time in self.t])}\n"
            f"  token  {_shorten([repr(token) for token in self.tokens])}"
        )

    __str__ = __repr__


class WeightsOverTime(dict):
    """The weights W(t) as a tree of arrays, whose leading axis is time unless t is one number.

    JAX takes it as a tree, and a tree made of it (`jax.tree.map`) is a plain dict.

    Args:
      names: the logical axes of each leaf but the first, by its path.
    """

    def __init__(
        self,
        tree: Weights,
        t: float | Float[np.ndarray, " times"],
        names: Mapping[tuple[str, ...], Sequence[str | None]],
    ):
        super().__init__(tree)
        self.t, self._names = t, names

    def __missing__(self, name: object) -> NoReturn:
        path = str(name).split("/")
        if tuple(path) in flatten_dict(dict(self)):
            raise KeyError(f"{name!r}: write W{''.join(f'[{each!r}]' for each in path)}")
        raise KeyError(f"{name!r}: there are {', '.join(self)}")

    @property
    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """The name of each axis of each leaf, by the leaf's path; None: it has no name."""
        first = ("t",) if np.ndim(self.t) else ()
        return {
            "/".join(path): (*first, *self._names.get(path, (None,) * (leaf.ndim - len(first))))
            for path, leaf in flatten_dict(dict(self)).items()
        }

    def __repr__(self) -> str:
        times = [f"{time:.3g}" for time in np.atleast_1d(self.t)]
        leaves, axes = flatten_dict(dict(self), sep="/"), self.axes
        wide = max(map(len, leaves))
        lines = [
            f"  {path:<{wide}}  [{_describe(axes[path], leaf.shape)}], {leaf.dtype}"
            for path, leaf in leaves.items()
        ]
        return "\n".join([f"W(t) at t = {_shorten(times)}", *lines])


jax.tree_util.register_pytree_with_keys(
    WeightsOverTime,
    lambda W: ([(jax.tree_util.DictKey(key), W[key]) for key in sorted(W)], tuple(sorted(W))),
    lambda keys, children: dict(zip(keys, children, strict=True)),  # type: ignore
)


def _describe(names: Sequence[str | None], shape: Sequence[int]) -> str:
    """`t 3, embed 128, 16`."""
    pairs = zip(names, shape, strict=True)
    return ", ".join(f"{name} {size}" if name else f"{size}" for name, size in pairs)


def _shorten(words: Sequence[str]) -> str:
    """The words, or the first of them and the last."""
    if len(words) <= _MOST:
        return ", ".join(words)
    return ", ".join([*words[: _MOST - 2], "...", words[-1]])


def check_reported(metrics: Mapping[str, Sequence]) -> None:
    """Raises an InputError if none of the runs has reported a loss, by its name."""
    if not any(metrics.values()):
        raise InputError(
            f"{', '.join(metrics)}: no loss has been reported yet; there is nothing in "
            "metrics.jsonl of the workdir"
        )


def import_plots(asked: str, module: str) -> ModuleType:
    """A module of `analysis` that draws, which `asked` needs; InputError without matplotlib."""
    need_package("matplotlib", asked, "leave it out")
    return importlib.import_module(f"t5x_diffeq.analysis.{module}")


@checked
class Figures:
    """Draws a run; each method returns a matplotlib figure, whose `savefig` writes it.

    Each raises an InputError if matplotlib isn't installed.

    Args:
      run: the model and its parameters.
      trained_grid: the scheme and the number of steps with which it was trained.
      metrics: returns the reports of the training by the run's name.
      trajectory: returns the states of a text.
      perplexity: returns the run's perplexity with a number of steps and a scheme, on at most so
        many batches.
    """

    def __init__(
        self,
        run: Run,
        trained_grid: tuple[str, int],
        metrics: Callable[[], dict[str, list[dict[str, float]]]],
        trajectory: Callable[[str], Trajectory],
        perplexity: Callable[[int, str, int | None], float],
    ):
        self._run, self._trained_grid = run, trained_grid
        self._metrics, self._trajectory = metrics, trajectory
        self._perplexity = perplexity

    def __call__(self) -> "Figure":
        """The training and validation losses over optimizer steps."""
        run_plots = import_plots("run.plot()", "run_plots")
        metrics = self._metrics()
        check_reported(metrics)
        return shown_in_notebooks(run_plots.losses_over_steps(metrics))

    def weights(self) -> "Figure":
        """W(t) at the grid's nodes: the path of each kernel, its norm, and its direction."""
        plots, placed = import_plots("run.plot.weights()", "depth_plots"), self._run.placed
        with placed.context():
            paths = make_weight_paths(placed.model, placed.mesh)(self._run.params)
        return shown_in_notebooks(plots.weight_paths(paths))

    def states(self, text: str) -> "Figure":
        """|y(t)| and |dy/dt| of each token of a text, as `trajectory` takes it."""
        run_plots = import_plots("run.plot.states()", "run_plots")
        y = self._trajectory(text)
        return shown_in_notebooks(run_plots.states_over_time(np.asarray(y), y.t, y.tokens))

    def depths(
        self,
        num_steps: Sequence[int] | None = None,
        schemes: Sequence[str] | None = None,
        eval_batches: int | None = 4,
    ) -> "Figure":
        """The perplexity on validation against the number of solver steps, a line per scheme.

        Args:
          num_steps: numbers of steps; None for half, once, twice and four times the run's own.
          schemes: schemes; None for the run's own.
          eval_batches: number of batches, from the first; None for the whole split.

        Raises:
          InputError: if the weights don't exist on one of the grids.
        """
        plots = import_plots("run.plot.depths()", "depth_plots")
        scheme, trained = self._trained_grid
        counts = num_steps or sorted({max(trained // 2, 1), trained, 2 * trained, 4 * trained})
        results = [
            {
                "scheme": each,
                "num_steps": count,
                "eval/perplexity": self._perplexity(count, each, eval_batches),
            }
            for each in schemes or [scheme]
            for count in counts
        ]
        return shown_in_notebooks(plots.perplexity_over_depth(results, self._trained_grid))


def write_figure(figure: "Figure", path: AnyPath) -> None:
    """Writes a figure to a file, whose suffix says as what: .png, .pdf or .svg."""
    image = import_plots("a figure", "figures").render_image(figure, path.suffix[1:])
    write_whole(path, image)
    log(f"figure in {path}")


def shown_in_notebooks(figure: "Figure") -> "Figure":
    """The figure, which IPython shows without pyplot."""
    render_image = import_plots("a figure", "figures").render_image
    figure._repr_png_ = partial(render_image, figure)  # type: ignore[attr-defined]
    return figure
