"""The report's section on spectra."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from t5x_diffeq.analysis import depth_plots, spectra
from t5x_diffeq.analysis.figures import make_drawing
from t5x_diffeq.analysis.report import Analysis, DataTable, Drawing, Row
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.ode.solvers import grid
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.sub_fields import make_block

_SMOOTH = 0.5  # below this roughness, values of W(t) between the nodes are shown
_PARTS = {"magnitude": "Magnitude", "real": "Real part"}
_COMPLEX = "complex eigenvalues from the largest magnitude down; dimensionless"


def spectra_section(
    model: LanguageModel, params: dict, times: int, perplexities: dict[int, float]
) -> Analysis:
    """The section on eigenvalues at the model's nodes or layers; between nodes if W(t) is smooth.

    Args:
      perplexities: the perplexity with the model's own number of solver steps, and with a number
        that has nodes in between, by these numbers; empty if the model has no other.
    """
    config = model.config
    layers = not source_of(config).any_time
    block = make_block(config)
    node_times = grid(config.scheme, config.num_steps).reshape(-1).astype(np.float64)
    W = nn.apply(LanguageModel.merged_weights, model)({"params": params})
    if not layers:  # some schemes read the same W(t) several times
        node_times, first = np.unique(node_times, return_index=True)
        W = jax.tree.map(lambda leaf: leaf[first], W)
    at_nodes = spectra.spectra(block, W)
    t, curves = np.arange(1.0, len(node_times) + 1) if layers else node_times, None
    rough = 0.0 if layers else spectra.roughness(config, params)
    if not layers and rough < _SMOOTH:
        t = np.linspace(0, 1, times)
        curves = spectra.spectra(
            block, spectra.weights_at(config, params, jnp.asarray(t, jnp.float32))
        )
    arrays = {"nodes": (node_times, "t at which the model reads its weights, in [0, 1]")}
    arrays |= {"times": (t, "layers, from 1" if layers else "t of the *_between arrays, if any")}
    heads = spectra.by_head(at_nodes)
    for kind, values in at_nodes.items():
        axes = "[node, head, rank]" if kind in heads else "[node, rank]"
        arrays[kind] = (values, f"{spectra.title_of(kind)}, {axes}: {_COMPLEX}")
        if curves:
            arrays[f"{kind}_between"] = (curves[kind], f"the same at `times`: {_COMPLEX}")
    return Analysis(
        name="spectra",
        title="Spectra",
        findings=[] if layers else [_describe_between(rough, perplexities)],
        method=_describe_method(config),
        tables=[_growth_table(at_nodes), *([_heads_table(heads)] if heads else [])],
        drawings=_spectra_drawings(at_nodes, curves, node_times, t, layers),
        arrays=arrays,
        numbers={
            f"{kind}/{name}": value
            for kind, values in at_nodes.items()
            for name, value in spectra.growth(values).items()
        },
    )


def _describe_between(rough: float, perplexities: dict[int, float]) -> str:
    """How smooth W(t) is between the nodes, and the model's perplexity there."""
    measured = " and ".join(f"{value:.4g} with {n} steps" for n, value in perplexities.items())
    perplexity = f" The perplexity on the validation split is {measured}." if measured else ""
    return (
        f"Halfway between nodes, W(t) is {rough:.2f} times half their distance away from the "
        "straight line (0: straight; 1.73: unrelated to the nodes; curves between the nodes are "
        f"drawn below {_SMOOTH:g}).{perplexity}"
    )


def _describe_method(config: ModelConfig) -> list[str]:
    how = [
        "Eigenvalues of W_Q W_K^T and W_V W_O of each head and of W_up W_down, in float64; for a "
        "head, of the product in the other order, which has the head's width and the same nonzero "
        "eigenvalues. "
        "Biases, norm scales and gates are left out. Complex pairs are kept; real parts and "
        "magnitudes are shown. Neighbouring nodes are alike, so a correlation with depth describes "
        "one run; docs/lab/spectra.md compares seeds of small models.",
    ]
    if config.architecture == "llama" and not config.block:
        how.append("With rotary positions W_Q W_K^T is the interaction at the same position only.")
    return how


def _growth_table(at_nodes: spectra.Spectra) -> DataTable:
    """A table that tests the paper's claim that spectra grow with depth."""
    rows: list[Row] = [
        (spectra.title_of(kind), *spectra.growth(values).values())
        for kind, values in at_nodes.items()
    ]
    columns = (
        *("first third", "last third", "last / first", "rank correlation"),
        "largest |lambda|, last / first",
    )
    title = (
        "Mean |lambda| in the first and the last third of the depth and their ratio, Spearman's "
        "correlation of mean |lambda| with depth, and the ratio of the largest |lambda|"
    )
    return DataTable(title, ("", *columns), rows)


def _heads_table(heads: spectra.Spectra) -> DataTable:
    scores = [
        score(values)
        for score in (spectra.positive_fraction, spectra.copying_score)
        for values in heads.values()
    ]
    rows: list[Row] = [
        (f"head {h + 1}", *(_head_score(score, h, n) for score in scores for n in (0, -1)))
        for h in range(max(values.shape[1] for values in heads.values()))
    ]
    columns = [
        f"{what} {spectra.title_of(which)}, {where}"
        for what in ("positive", "copying")
        for which in heads
        for where in ("first", "last")
    ]
    title = (
        "Share of eigenvalues with positive real part, and the sum of lambda over the sum of "
        "|lambda| (1: the head copies, -1: it repels), at the first and the last node"
    )
    return DataTable(title, ("", *columns), rows)


def _head_score(score: np.ndarray, head: int, node: int) -> float | str:
    """The score of a head; empty where this product has fewer heads than another."""
    return float(score[node, head]) if head < score.shape[1] else ""


def _spectra_drawings(
    at_nodes: spectra.Spectra,
    curves: spectra.Spectra | None,
    node_times: np.ndarray,
    t: np.ndarray,
    layers: bool,
) -> dict[str, Drawing]:
    depth, nodes = ("layer", "layers") if layers else ("depth t", "nodes")
    heads = spectra.by_head(at_nodes)
    drawings = {
        "means": make_drawing(
            partial(depth_plots.mean_magnitudes, at_nodes, t if layers else node_times, depth),
            f"Mean |lambda| of each product at the {nodes} (dots), and of each head (grey lines).",
        )
    }
    if heads:
        labels = [f"{n + 1}" if layers else f"{t:.2f}" for n, t in enumerate(node_times)]
        drawings["heads"] = make_drawing(
            partial(depth_plots.heat_maps, heads, labels, depth),
            "Of each head, mean |lambda| and the share of eigenvalues with positive real part "
            "(blue: it copies; red: it repels).",
        )
    line = "Curves are its values between the dots" if curves else "Dotted lines join the dots"
    for part, title in _PARTS.items():
        for kind, dots in at_nodes.items():
            name, values = spectra.title_of(kind), (curves or at_nodes)[kind]
            if kind not in heads:
                values, dots = values[:, None], dots[:, None]
            tex, trained = f"${depth_plots.tex(name)}$", (node_times, dots) if curves else None
            drawings[f"{kind}_{part}"] = make_drawing(
                partial(depth_plots.eigenvalues_over_depth, t, values, part, tex, trained, depth),
                f"{title} of every eigenvalue of {name}, at the {nodes} (dots). {line}, from the "
                "largest (red) to the smallest (orange).",
            )
    return drawings
