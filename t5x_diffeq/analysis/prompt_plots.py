"""A prompt as text, shaded by how sensitive the state is to each token, and its exponents."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from t5x_diffeq.analysis.figures import SHADES, WIDTH, make_figure
from t5x_diffeq.analysis.report import RETURN

_FONT, _LINE = 7.5, 0.17  # a prompt's font size in points, its line height in inches
_COLUMNS = int(0.98 * WIDTH * 72 / (0.602 * _FONT))  # a letter of DejaVu Sans Mono is 0.602 em wide


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
    """Writes a line of tokens, one column per character."""
    column = 0
    for token in line:
        text = escape_piece(pieces[token])
        width = len(pieces[token])
        ax.add_patch(Rectangle((column, height - 0.45), width, 0.9, color=shades[token], lw=0))
        ax.text(column, height, text, family="monospace", fontsize=_FONT, va="center")
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
    """The values scaled to [0, 1], from smallest to largest; those that aren't finite become 0."""
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
