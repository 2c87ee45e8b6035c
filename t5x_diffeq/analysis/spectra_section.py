"""The report's section on spectra."""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from t5x_diffeq.analysis import plots, spectra
from t5x_diffeq.analysis.plots import make_drawing
from t5x_diffeq.analysis.report import Drawing, Row, Section, Table
from t5x_diffeq.models.language_model import LanguageModel
from t5x_diffeq.models.sub_fields import make_block
from t5x_diffeq.ode.schemes import grid

_PARTS = {"magnitude": "Magnitude", "real": "Real part"}
_COMPLEX = "complex eigenvalues from the largest magnitude down; dimensionless"


def spectra_section(
    model: LanguageModel, params: dict, times: int, perplexities: dict[int, float]
) -> Section:
    """The section on eigenvalues at the model's nodes or layers; for an ODE also between nodes.

    Args:
      model: the model.
      params: its parameters.
      times: number of times between 0 and 1.
      perplexities: by number of solver steps: the model's own and one with nodes in between.
    """
    config = model.config
    layers = config.weights == "per_layer"
    rotary = config.architecture == "llama" and not config.block
    block = make_block(config)
    own = spectra.spectra(block, nn.apply(LanguageModel.merged_weights, model)({"params": params}))
    at = grid(config.scheme, config.num_steps).reshape(-1).astype(np.float64)
    curves, t = own, np.arange(1.0, len(at) + 1) if layers else at
    if not layers:
        t = np.linspace(0, 1, times)
        W = spectra.weights_at(config, params, jnp.asarray(t, jnp.float32))
        curves = spectra.spectra(block, W)
    arrays = {"nodes": (at, "t at which the model reads its weights, in [0, 1]")}
    arrays |= {"times": (t, "layers, from 1" if layers else "t of the *_between arrays")}
    heads = spectra.by_head(own)
    for kind, values in own.items():
        axes = "[node, head, rank]" if kind in heads else "[node, rank]"
        arrays[kind] = (values, f"{spectra.title_of(kind)}, {axes}: {_COMPLEX}")
        if not layers:
            arrays[f"{kind}_between"] = (curves[kind], f"the same at `times`: {_COMPLEX}")
    return Section(
        name="spectra",
        title="Spectra",
        findings=_spectra_findings(own),
        method=_describe_method(layers, perplexities, rotary),
        tables=[_growth_table(own), *([_heads_table(heads)] if heads else [])],
        drawings=_spectra_drawings(own, curves, at, t, layers),
        arrays=arrays,
        numbers={
            f"{kind}/{name}": value
            for kind, values in own.items()
            for name, value in spectra.growth(values).items()
        },
    )


def _spectra_findings(own: spectra.Spectra) -> list[str]:
    """Whether magnitudes grow over depth, for each product of weights."""
    found = []
    for kind, values in own.items():
        name, grown = spectra.title_of(kind), spectra.growth(values)
        ratio = grown["ratio"]
        verb = "grow" if ratio > 1.05 else "shrink" if ratio < 0.95 else "keep their size"
        found.append(
            f"The eigenvalues of {name} {verb} over the depth: their mean magnitude in the last "
            f"third is {ratio:.2f} times that in the first (rank correlation with depth "
            f"{grown['rank_correlation']:.2f})."
        )
    return found


def _describe_method(layers: bool, perplexities: dict[int, float], rotary: bool) -> list[str]:
    how = [
        "Eigenvalues of W_Q W_K^T and W_V W_O of each head and of W_up W_down, in float64; those "
        "of a head from the product of the size of a head, which has the same nonzero ones. "
        "Biases, norm scales and gates are left out. Complex pairs are kept; real parts and "
        "magnitudes are shown.",
        "One run does not show whether spectra grow with depth: seeds differ. Three seeds of small "
        "models are compared in launch/reproduce/README.md, appendix E.",
    ]
    if rotary:
        how.append("With rotary positions W_Q W_K^T is the interaction at the same position only.")
    if not layers:
        measured = "; ".join(f"{n} steps {p:.4g}" for n, p in perplexities.items())
        how.append(
            "Dots are the nodes that the model runs at; curves are W(t) between them, which the "
            "model was never trained at. Perplexity on the validation split, at its own "
            f"number of steps and with as many nodes between: {measured}."
        )
    return how


def _growth_table(own: spectra.Spectra) -> Table:
    """A table that tests the paper's claim that spectra grow with depth."""
    rows: list[Row] = [
        (spectra.title_of(kind), *spectra.growth(values).values()) for kind, values in own.items()
    ]
    columns = ("first third", "last third", "last / first", "rank correlation", "radius l / f")
    title = (
        "Growth over depth: mean |lambda| in the first and the last third, their ratio, Spearman's "
        "correlation of mean |lambda| with depth, and the ratio of the largest |lambda|"
    )
    return Table(title, ("", *columns), rows)


def _heads_table(heads: spectra.Spectra) -> Table:
    scores = [
        score(values)
        for score in (spectra.positive_fraction, spectra.copying_score)
        for values in heads.values()
    ]
    rows: list[Row] = [
        (f"head {h + 1}", *(_of_head(score, h, n) for score in scores for n in (0, -1)))
        for h in range(max(values.shape[1] for values in heads.values()))
    ]
    columns = [
        f"{what} {which.upper()} {where}"
        for what in ("positive", "copying")
        for which in heads
        for where in ("first", "last")
    ]
    title = (
        "Share of eigenvalues with positive real part, and sum lambda / sum |lambda| (1: copies, "
        "-1: repels), at the first and the last node"
    )
    return Table(title, ("", *columns), rows)


def _of_head(score: np.ndarray, head: int, node: int) -> float | str:
    """The score of a head; empty where this product has fewer heads than another."""
    return float(score[node, head]) if head < score.shape[1] else ""


def _spectra_drawings(
    own: spectra.Spectra,
    curves: spectra.Spectra,
    at: np.ndarray,
    t: np.ndarray,
    layers: bool,
) -> dict[str, Drawing]:
    depth = "layer" if layers else "depth t"
    drawings = {}
    heads = spectra.by_head(own)
    for kind in own:
        name, values, dots = spectra.title_of(kind), curves[kind], own[kind]
        if kind not in heads:
            values, dots = values[:, None], dots[:, None]
        for part, title in _PARTS.items():
            figure = plots.eigenvalues_over_depth(
                t, values, part, f"${plots.tex(name)}$", None if layers else (at, dots), depth
            )
            drawings[f"{kind}_{part}"] = make_drawing(
                figure, f"{title} of the eigenvalues of {name}."
            )
    labels = [f"{n + 1}" if layers else f"{t:.2f}" for n, t in enumerate(at)]
    if heads:
        figure = plots.heat_maps(heads, labels, depth)
        caption = "Mean magnitude and positive fraction of each head."
        drawings["heads"] = make_drawing(figure, caption)
    return drawings
