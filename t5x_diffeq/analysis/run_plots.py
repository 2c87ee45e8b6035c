"""Figures of one run: its losses while it trained, and the states of a text."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from t5x_diffeq.analysis.figures import make_figure
from t5x_diffeq.analysis.prompt_plots import escape_piece

_MOST_NAMES = 12  # of tokens in a legend


def losses_over_steps(metrics: Sequence[Mapping[str, float]]) -> Figure:
    """The training and validation losses over optimizer steps, from a run's metrics."""
    figure = make_figure(2.4)
    axes = figure.subplots()
    for key, name, form in (("train/loss", "training", "-"), ("eval/loss", "validation", "o-")):
        points = [(line["step"], line[key]) for line in metrics if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), form, markersize=3, label=name)
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    axes.legend()
    return figure


def states_over_time(
    states: Float[np.ndarray, "states L D"],
    t: Float[np.ndarray, " states"],
    tokens: Sequence[str],
) -> Figure:
    """The size of each token's state, and how fast it moves: |y(t)|, and |dy/dt| in each step."""
    states = states.astype(np.float32)
    figure = make_figure(2.4)
    size, speed = figure.subplots(1, 2)
    norms = np.linalg.norm(states, axis=-1)
    speeds = np.linalg.norm(np.diff(states, axis=0), axis=-1) / np.diff(t)[:, None]
    for number, token in enumerate(tokens):
        name = f"'{escape_piece(token)}'" if number < _MOST_NAMES else None
        (line,) = size.plot(t, norms[:, number], ".-", markersize=3, label=name)
        speed.stairs(speeds[:, number], t, color=line.get_color(), linewidth=1.0, baseline=None)
    size.set(xlabel="t", ylabel="|y(t)|")
    speed.set(xlabel="t", ylabel="|dy/dt|, mean of a step")
    figure.legend(fontsize=6, loc="outside lower center", ncols=6)
    return figure
