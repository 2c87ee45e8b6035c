"""Figures of one run: its losses, its inside at an optimizer step, states of a text, a prompt."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from t5x_diffeq.analysis.figures import SHADES, WIDTH, make_figure
from t5x_diffeq.analysis.report import RETURN

_MOST_NAMES = 12  # of tokens in a legend


def losses_over_steps(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """The training and validation losses over optimizer steps, from runs' metrics by name."""
    figure = make_figure(2.4 + 0.2 * len(runs))
    axes = figure.subplots()
    for number, (run, metrics) in enumerate(runs.items()):
        for kind, name, form in (("train", "training", "-"), ("eval", "validation", "o-")):
            key, label = f"{kind}/loss", f"{escape_piece(run)}, {name}"
            points = [(line["step"], line[key]) for line in metrics if key in line]
            if points:
                (line,) = axes.plot(*zip(*points, strict=True), form, markersize=3, label=label)
                line.set(color=f"C{number}", alpha=0.4 if kind == "train" else 1)
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    return figure


def states_over_time(
    states: Float[np.ndarray, "states L D"], t: Float[np.ndarray, " states"], tokens: Sequence[str]
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
      times: the nodes t_n; None for weights of layers, which are drawn over layer numbers.
    """
    figure = Figure(figsize=(10.5, 5.6), dpi=110)
    # A constrained layout takes 1.5 times as long to draw, while the model trains.
    figure.subplots_adjust(left=0.06, right=0.86, bottom=0.09, top=0.9, hspace=0.25, wspace=0.3)
    panels = figure.subplots(2, 3)
    for ax, (kind, label) in zip(panels.flat, _OF_LAYERS.items(), strict=False):
        shown = {name: curve for name, curve in curves.items() if name.startswith(f"{kind}/")}
        _draw_curves(ax, {name.partition("/")[2]: curve for name, curve in shown.items()}, times)
        ax.set_title(label, fontsize=_FONT + 1)
    for ax, (label, names) in zip(panels.flat[len(_OF_LAYERS) :], _OF_STEPS.items(), strict=True):
        shown = {name: curves[name] for name in names}
        steps = len(curves["f"])
        _draw_curves(ax, shown, None if times is None else np.arange(len(shown[names[0]])) / steps)
        ax.set_title(f"rms of {label}", fontsize=_FONT + 1)
        ax.legend(fontsize=_FONT, frameon=False)
    handles, labels = panels.flat[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", fontsize=_FONT, frameon=False)
    figure.supxlabel("layer" if times is None else "depth t", fontsize=_FONT + 1)
    figure.suptitle(title, fontsize=_FONT + 2)
    return figure


def _draw_curves(
    ax: Axes, curves: Mapping[str, Float[np.ndarray, " n"]], times: Float[np.ndarray, " n"] | None
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


# A prompt's font size in points, its line height in inches, its letters in a line: a letter of
# DejaVu Sans Mono is 0.602 em wide.
_PROMPT_FONT, _LINE = 7.5, 0.17
_COLUMNS = int(0.98 * WIDTH * 72 / (0.602 * _PROMPT_FONT))


def shaded_prompt(pieces: Sequence[str], rows: dict[str, Float[np.ndarray, " L"]]) -> Figure:
    """The prompt as text with each token's background shaded, once per row (figure 3)."""
    lines = break_lines(pieces, _COLUMNS)
    height = _LINE * (len(lines) + 2)
    figure = Figure(figsize=(WIDTH, height * len(rows)))
    for number, (title, values) in enumerate(rows.items()):
        bottom = 1 - (number + 1) / len(rows)
        ax = figure.add_axes((0.01, bottom, 0.98, 1 / len(rows)))
        ax.set(xlim=(0, _COLUMNS), ylim=(-len(lines) - 0.5, 1.5))
        ax.set_axis_off()
        ax.text(0, 0.5, title, fontsize=8, va="center")
        shades = SHADES(0.85 * scale_to_unit(values))
        for row, line in enumerate(lines):
            _write_tokens(ax, -row - 0.5, line, pieces, shades)
    return figure


def _write_tokens(
    ax: Axes,
    height: float,
    line: list[int],
    pieces: Sequence[str],
    shades: Float[np.ndarray, "L 4"],
) -> None:
    column = 0
    for token in line:
        text = escape_piece(pieces[token])
        width = len(pieces[token])
        ax.add_patch(Rectangle((column, height - 0.45), width, 0.9, color=shades[token], lw=0))
        ax.text(column, height, text, family="monospace", fontsize=_PROMPT_FONT, va="center")
        column += width


def break_lines(pieces: Sequence[str], width: int) -> list[list[int]]:
    """Token indices by line, of at most `width` characters; a newline in the text ends a line."""
    lines: list[list[int]] = [[]]
    used = 0
    for token, piece in enumerate(pieces):
        if lines[-1] and (used + len(piece) > width or "\n" in pieces[lines[-1][-1]]):
            lines, used = [*lines, []], 0
        lines[-1].append(token)
        used += len(piece)
    return lines


def escape_piece(piece: str) -> str:
    """A token's text on one line, for matplotlib, whose math delimiter is escaped."""
    return piece.replace("\n", RETURN).replace("\t", "\u2192").replace("$", r"\$")


def scale_to_unit(values: Float[np.ndarray, " L"]) -> Float[np.ndarray, " L"]:
    """The values scaled to [0, 1], smallest to largest; values that aren't finite become 0."""
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros(len(values))
    low, high = values[finite].min(), values[finite].max()
    return np.where(finite, (np.where(finite, values, low) - low) / max(high - low, 1e-12), 0)


def exponents_over_depth(
    by_step: Float[np.ndarray, "N K D"], names: Sequence[str], width: float = WIDTH
) -> Figure:
    """The mean exponent of tokens up to each depth: sums of log |diag R|, divided by D.

    It is log |det M| / D in each convention, and at the end the mean of the exponents.
    """
    means = by_step.mean(-1)
    total = np.concatenate((np.zeros_like(means[:1]), np.cumsum(means, axis=0)))
    figure = make_figure(2.6, width)
    ax = figure.subplots()
    for curve, name in zip(total.T, names, strict=True):
        ax.plot(np.linspace(0, 1, len(total)), curve, ".-", label=name)
    ax.axhline(0, color="grey", linewidth=0.4)
    ax.set(xlabel="depth t", ylabel="mean exponent up to t")
    figure.legend(fontsize=7, loc="outside lower center", ncols=int(width // 1.75))
    return figure
