"""The report's section on token-level sensitivity."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from t5x_diffeq.analysis import run_plots
from t5x_diffeq.analysis.figures import make_drawing, render_image
from t5x_diffeq.analysis.lyapunov import Exponents, exact_trajectory, lyapunov_exponents
from t5x_diffeq.analysis.report import Analysis, DataTable, Drawing, as_code, prompt_markup
from t5x_diffeq.analysis.spectra import rank_correlation
from t5x_diffeq.model.language_model import LanguageModel, in_one_document
from t5x_diffeq.model.layers.array_types import State, Tokens, Weights
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.model.sub_fields import has_method, make_block

_LINES = 6  # tokens whose exponents are drawn over depth
_COLUMNS = ("token", "largest exponent", "mean exponent")
_COMMON = (
    "The outlined token is the one whose output, the prediction of the next, is differentiated. "
    "Its exponent for itself is in the table and sets no shade."
)
_ROLLOUT = (
    "Beside it, attention rollout: the product over the steps of (A + I) / 2, A the mean over "
    "heads."
)
_NO_ROLLOUT = "The block has no `attention_matrix`, so attention rollout is left out."
_METHOD = {
    "pair": (
        "M <- (I + dt J_jk) M at each step from M = I, J_jk the Jacobian of the vector field at "
        "token j with respect to token k, at the state before the step and the step's own weights "
        "(for schemes other than Euler, the Jacobian of the step's increment). No sum over other "
        "tokens: only the path that stays between the two. By QR at each step; exponents are log "
        "singular values of M over the whole depth, which is one unit of time. For the token "
        "itself the term is dt J_jj, for another token dt J_jk: exponents near 0 mean little "
        "influence.",
        _COMMON,
    ),
    "official": (
        "The official code's convention: M <- (I + dt J_jk) M with the weights at t = n/N and the "
        "state after step n, and as exponents the sums over the steps of log |diag R|.",
        _COMMON,
    ),
    "full": (
        "Log singular values of d y_j(1) / d y_k(0), by all paths through all tokens.",
        _COMMON,
    ),
}


def lyapunov_section(
    model: LanguageModel,
    params: dict,
    prompts: Sequence[Sequence[int]],
    pieces: Sequence[Sequence[str]],
    convention: str,
) -> Analysis:
    """The section on the tokens of each prompt that the last token's output is sensitive to."""
    tokens, outputs = _pad_prompts(prompts)
    exponents = lyapunov_exponents(model, params, tokens, outputs=outputs, convention=convention)
    rolls_out = has_method(model.config, "attention_matrix")
    flow = attention_rollout(model, params, tokens, outputs) if rolls_out else None
    columns = (*_COLUMNS, "rollout") if rolls_out else _COLUMNS
    markup, rows, findings = "", [], []
    drawings: dict[str, Drawing] = {}
    for p, text in enumerate(pieces):
        shown = {f"Largest exponent ({convention})": exponents.largest[p, : len(text)]}
        if flow is not None:
            shown["Attention rollout"] = flow[p, : len(text)]
            rank = rank_correlation(*(values[:-1] for values in shown.values()))
            findings.append(
                f"Prompt {p + 1}: the rank correlation of the largest exponents with attention "
                f"rollout, over the {len(text) - 1} tokens before the last, is {rank:.2f}."
            )
        for title, values in shown.items():
            shades = run_plots.scale_to_unit(values[:-1])
            markup += prompt_markup(f"Prompt {p + 1}: {title}", text, shades, values)
        drawings |= _prompt_drawings(p, text, shown, exponents)
        rows += list(_prompt_rows(p, text, exponents, flow))
    return Analysis(
        name="lyapunov",
        title="Sensitivity to tokens",
        findings=findings,
        method=[*_METHOD[convention], _ROLLOUT if rolls_out else _NO_ROLLOUT],
        tables=[
            DataTable(f"Finite-time exponents ({convention}) of each input token", columns, rows)
        ],
        drawings=drawings,
        arrays=_arrays_of(tokens, outputs, exponents, flow),
        markup=markup,
    )


def _pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[Tokens, Int[np.ndarray, " B"]]:
    """The prompts padded to one length, and the index of each one's last token."""
    outputs = np.array([len(prompt) - 1 for prompt in prompts])
    tokens = np.zeros((len(prompts), max(outputs) + 1), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), outputs


def _prompt_drawings(
    p: int, text: Sequence[str], shown: dict[str, Float[np.ndarray, " L"]], exponents: Exponents
) -> dict[str, Drawing]:
    """The prompt as a figure for a paper (the page shows it as text), and exponents over depth."""
    shades = {title: np.append(values[:-1], np.nan) for title, values in shown.items()}
    figure = run_plots.shaded_prompt(text, shades)
    caption = f"Prompt {p + 1}: sensitivity, and attention alone."
    files = Drawing(caption, render_image(figure, "png"), render_image(figure, "pdf"))
    drawings = {f"prompt{p + 1}": files}
    if exponents.by_step is not None and len(text) > 1:
        most = np.argsort(-exponents.largest[p, : len(text) - 1])[:_LINES]
        names = [f"{k}: {run_plots.escape_piece(text[k])}" for k in most]
        drawings[f"depth{p + 1}"] = make_drawing(
            partial(run_plots.exponents_over_depth, exponents.by_step[:, p, most], names),
            f"Prompt {p + 1}: the mean of all exponents up to depth t, of the {len(most)} tokens "
            "before the last with the largest exponents. It ends at the mean of the table.",
        )
    return drawings


def _prompt_rows(
    p: int, text: Sequence[str], exponents: Exponents, flow: Float[np.ndarray, "B L"] | None
) -> Iterator[tuple[str | float, ...]]:
    for k, piece in enumerate(text):
        each = exponents.exponents[p, k]
        numbers = [each.max(), each.mean(), *([] if flow is None else [flow[p, k]])]
        remark = " (itself)" if k == len(text) - 1 else ""
        yield (f"{p + 1}.{k} {as_code(piece)}{remark}", *map(float, numbers))


def _arrays_of(
    tokens: Tokens,
    outputs: Int[np.ndarray, " B"],
    exponents: Exponents,
    flow: Float[np.ndarray, "B L"] | None,
) -> dict[str, tuple[np.ndarray, str]]:
    arrays = {
        "tokens": (np.asarray(tokens), "[prompt, token], padded at the end with 0"),
        "outputs": (outputs, "[prompt]: the token whose output is differentiated"),
        "exponents": (exponents.exponents, "[prompt, input token, rank], per unit of depth time"),
    }
    if flow is not None:
        arrays["rollout"] = (flow, "[prompt, input token]: attention rollout; sums to 1")
    if exponents.by_step is None:
        return arrays
    return arrays | {"by_step": (exponents.by_step, "[step, prompt, input token, D]: log |diag R|")}


def attention_rollout(
    model: LanguageModel, params: dict, tokens: Tokens, outputs: Int[np.ndarray, " B"]
) -> Float[np.ndarray, "B L"]:
    """How much of each input token attention carries to the output token; a row sums to 1.

    It is the product over the steps of (A + I) / 2, with A the mean over heads, at the weights and
    states with which each step begins. The block must have an `attention_matrix`.
    """
    config, weights, states = exact_trajectory(model, params, tokens)
    nodes = len(find_scheme(config.scheme).nodes)
    first = jax.tree.map(lambda leaf: leaf[::nodes], weights)
    block = make_block(config)

    @jax.jit
    def matrix(W: Weights, y: State) -> Float[Array, "B H L L"]:
        return nn.apply(type(block).attention_matrix, block)(
            {"params": W}, y, in_one_document(tokens)
        )

    flow = np.eye(tokens.shape[1])
    for n in range(config.num_steps):
        A = np.asarray(matrix(jax.tree.map(lambda leaf, n=n: leaf[n], first), states[n]))
        flow = (A.mean(1) + np.eye(tokens.shape[1])) / 2 @ flow
    return flow[np.arange(len(outputs)), outputs]
