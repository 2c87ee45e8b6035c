"""One figure of what happens inside a model at an optimizer step, as curves over depth."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_OF_LAYERS = {  # panels with a curve for each generated layer, by the prefix of their names
    "gradient": "|dL/dW|",
    "weights": "|W|",
    "update": "|change of W|",
    "dW_dt": "|dW/dt|",
}
_OF_STEPS = {"sub-fields": ("f", "g"), "state": ("state",)}  # panels with a value per solver step
_COLOURS = "tab20"
_FONT = 7


def figure_of_curves(
    curves: Mapping[str, Float[np.ndarray, " n"]],
    times: Float[np.ndarray, " nodes"] | None,
    title: str,
) -> Figure:
    """Norms of gradient, weights, update and dW/dt by layer; rms of f, g and the state.

    Args:
      curves: those of `diagnostics.watch`, by name.
      times: the nodes t_n; None for weights of layers, which are drawn over layer numbers.
      title: the figure's title.
    """
    figure = Figure(figsize=(10.5, 5.6), dpi=110)
    # Drawn in two thirds of the time that a constrained layout takes, while the model trains.
    figure.subplots_adjust(left=0.06, right=0.86, bottom=0.09, top=0.9, hspace=0.25, wspace=0.3)
    panels = figure.subplots(2, 3)
    for ax, (kind, label) in zip(panels.flat, _OF_LAYERS.items(), strict=False):
        own = {name: curve for name, curve in curves.items() if name.startswith(f"{kind}/")}
        _draw(ax, {name.partition("/")[2]: curve for name, curve in own.items()}, times)
        ax.set_title(label, fontsize=_FONT + 1)
    for ax, (label, names) in zip(panels.flat[len(_OF_LAYERS) :], _OF_STEPS.items(), strict=True):
        own = {name: curves[name] for name in names}
        steps = len(curves["f"])
        _draw(ax, own, None if times is None else np.arange(len(own[names[0]])) / steps)
        ax.set_title(f"rms of {label}", fontsize=_FONT + 1)
        ax.legend(fontsize=_FONT, frameon=False)
    handles, labels = panels.flat[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", fontsize=_FONT, frameon=False)
    figure.supxlabel("layer" if times is None else "depth t", fontsize=_FONT + 1)
    figure.suptitle(title, fontsize=_FONT + 2)
    return figure


def _draw(
    ax: Axes,
    curves: Mapping[str, Float[np.ndarray, " n"]],
    times: Float[np.ndarray, " n"] | None,
) -> None:
    """The curves, on a logarithmic axis; values that are not positive are left out.

    A curve with one value fewer than there are times is drawn between them.
    """
    for n, (name, curve) in enumerate(curves.items()):
        x = np.arange(len(curve)) if times is None else times
        if len(x) > len(curve):
            x = (x[1:] + x[:-1]) / 2
        shown = np.where(curve > 0, curve, np.nan)
        ax.plot(x, shown, ".-", label=name, color=colormaps[_COLOURS](n % 20), linewidth=1)
    if any((curve > 0).any() for curve in curves.values()):
        ax.set_yscale("log")
    ax.tick_params(which="both", labelsize=_FONT)
    ax.spines[["top", "right"]].set_visible(False)
