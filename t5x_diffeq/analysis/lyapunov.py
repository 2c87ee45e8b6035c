"""Token-level sensitivity by finite-time Lyapunov exponents (paper, section 5.2, appendix B).

Three conventions, for an output token j and every input token k:

    pair       M <- (I + dt J_jk(y(n), W_n)) M for each step n, starting from M = I: only the path
               between k and j (equation 7). y(n) is the state before the step, W_n the weights
               that the step uses (t = (n+1)/N for Euler). With schemes other than Euler, dt J_jk
               is the Jacobian of the step's increment. The exponents are the logarithms of M's
               singular values.
    official   the official code's: weights at t = n/N instead, the state after the step, and as
               exponents the sums over the steps of log |diag R| of the QR factors. Euler only.
    full       M = d y_j(1) / d y_k(0), over all paths through all tokens; exponents as for `pair`.

Summed over few steps, log |diag R| depends on the order of the coordinates, because the frame has
no time to align with the growing directions; singular values don't. Both have the same sum,
log |det M|. Exponents are per unit of depth time, in which the whole model is 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from t5x_diffeq.analysis.spectra import weights_at
from t5x_diffeq.analysis.tangents import Chunks, StepMap, StepWeights, full_tangent, pair_growth
from t5x_diffeq.config.keys.values import CONVENTIONS
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel, in_one_document
from t5x_diffeq.model.layers.array_types import State, States, Tokens, Weights
from t5x_diffeq.model.ode.integrate import step_function, step_inputs
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.model.ode.sources import source_of
from t5x_diffeq.model.sub_fields import vector_field
from t5x_diffeq.system.chips import GIB
from t5x_diffeq.system.console import Progress
from t5x_diffeq.system.errors import InputError


@dataclass(frozen=True)
class Exponents:
    """Exponents of each prompt, for each input token; NaN for tokens after the output token."""

    # per unit of depth time, in decreasing order (`official`: in the frame's order)
    exponents: Float[np.ndarray, "B L D"]
    # log |diag R| of each step, which has the same sum over steps and D as `exponents` over D. None
    # for `full`, which has no frame per pair.
    by_step: Float[np.ndarray, "N B L D"] | None

    @property
    def largest(self) -> Float[np.ndarray, "B L"]:
        """The largest exponent of each input token, which is the shade in figure 3."""
        return self.exponents.max(-1)


def lyapunov_exponents(
    model: LanguageModel,
    params: dict,
    tokens: Tokens,
    *,
    outputs: Int[np.ndarray, " B"] | None = None,
    convention: str = "pair",
    memory: float = 1.0,
) -> Exponents:
    """Finite-time exponents of each prompt's output token for every input token, in float32.

    Args:
      tokens: prompts, padded at the end to one length.
      outputs: index of each prompt's output token; None for the last token.
      convention: "pair", "official" or "full"; see the top of this file.
      memory: GiB that the tangents and Jacobian products may take at once, approximately.

    Raises:
      InputError: if the convention is unknown or the model has no weights for it, or a prompt is
        too long, or an index is out of range.
    """
    outputs = np.full(len(tokens), tokens.shape[1] - 1) if outputs is None else np.asarray(outputs)
    _check_arguments(model.config, tokens, outputs, convention)
    config, weights, states = exact_trajectory(model, params, tokens)
    step, N = step_map(config, tokens.shape[1]), config.num_steps
    by_step, _ = step_inputs(weights, config.scheme, N, key=None)
    if convention == "official":
        shifted = weights_at(config, params, jnp.asarray(np.arange(N) / N, jnp.float32))
        by_step, _ = step_inputs(shifted, "euler", N, key=None)
    # The official code takes the state after the step.
    step_states = states[1:] if convention == "official" else states[:-1]
    if convention == "full":
        result = _full_exponents(step, by_step, step_states, outputs, memory)
    else:
        result = pair_exponents(step, by_step, step_states, outputs, memory, convention)
    return _mask_later_tokens(result, outputs)


def exact_trajectory(
    model: LanguageModel, params: dict, tokens: Tokens
) -> tuple[ModelConfig, Weights, States]:
    """The model's config in float32, and the weights and the states of a pass in float32."""
    # XLA's attention takes prompts of any length; the kernels don't.
    model = LanguageModel(replace(model.config.in_float32(), attention="xla", remat="none"))
    weights = jax.jit(partial(model.apply, method="merged_weights"))({"params": params})
    states = jax.jit(partial(model.apply, method="trajectory"))({"params": params}, tokens, weights)
    return model.config, weights, states


# Cached, because a step is a static argument of compiled functions: a new one compiles them again.
@lru_cache
def step_map(config: ModelConfig, length: int) -> StepMap:
    """The step S_n of the model's scheme."""

    def step(y: State, W: Weights) -> State:
        places = in_one_document(jnp.zeros((len(y), length), jnp.int32))
        field = vector_field(config, places)
        return step_function(field, config.scheme, config.dt)(y, (W, None))

    return step


def pair_exponents(
    step: StepMap,
    weights: StepWeights,
    states: Float[Array, "N B L D"],
    outputs: Int[np.ndarray, " B"],
    memory: float = 1.0,
    convention: str = "pair",
) -> Exponents:
    """The exponents of the conventions `pair` and `official`, for any step of any field.

    Args:
      memory: approximate limit in GiB.
      convention: whether exponents are from singular values of M or from sums over the frame.
    """
    chunks = choose_chunks(memory, states, weights)
    logs = np.zeros(states.shape, np.float32)
    exponents = np.zeros(states.shape[1:], np.float32)
    for start in _chunk_starts(states.shape[2], chunks.tokens):
        part = slice(start, start + chunks.tokens)
        growth, product = pair_growth(step, weights, states, outputs, jnp.asarray(start), chunks)
        logs[:, :, part] = growth
        exponents[:, part] = (
            _log_singular_values(product) if convention == "pair" else growth.sum(0)
        )
    return Exponents(exponents, logs)


def _full_exponents(
    step: StepMap,
    weights: StepWeights,
    states: Float[Array, "N B L D"],
    outputs: Int[np.ndarray, " B"],
    memory: float = 1.0,
) -> Exponents:
    """The exponents of the convention `full`; takes the arguments of `pair_exponents`."""
    width = states.shape[-1]
    products = choose_chunks(memory, states, weights).products
    M = np.zeros((*states.shape[1:], width), np.float32)
    for start in _chunk_starts(width, products):
        part = slice(start, start + products)
        units = jnp.eye(width, dtype=states.dtype)[part]
        rows = full_tangent(step, weights, states, outputs, units, products)
        M[..., part] = np.moveaxis(np.asarray(rows), 0, -1)
    return Exponents(_log_singular_values(M), None)


def _log_singular_values(M: Float[Array | np.ndarray, "B L D D"]) -> Float[np.ndarray, "B L D"]:
    """The logarithms of M's singular values, decreasing, in float64; -inf where M is singular."""
    values = [np.linalg.svd(np.asarray(row, np.float64), compute_uv=False) for row in M]
    with np.errstate(divide="ignore"):
        return np.log(np.stack(values)).astype(np.float32)


def _mask_later_tokens(result: Exponents, outputs: Int[np.ndarray, " B"]) -> Exponents:
    """Sets NaN where the input token comes after the output token, which it can't affect."""
    after = np.arange(result.exponents.shape[1]) > outputs[:, None]
    exponents = np.where(after[..., None], np.nan, result.exponents)
    by_step = result.by_step
    return Exponents(
        exponents, None if by_step is None else np.where(after[..., None], np.nan, by_step)
    )


def _chunk_starts(total: int, size: int) -> Iterator[int]:
    """The first indices of chunks that cover `total`; the last may overlap. Shows progress."""
    with Progress("tangents", total, "of the prompt") as progress:
        for start in range(0, total, size):
            yield min(start, max(total - size, 0))
            progress.update(min(start + size, total))


def choose_chunks(memory: float, states: Float[Array, "N B L D"], weights: StepWeights) -> Chunks:
    """Chunk sizes that take about `memory` GiB: half for tangents, half for products.

    A token needs five `[D, D]` arrays at once: the blocks, their rearrangement, Q, R and the
    product. A product stores cotangents of the block's inner arrays, as wide as its weights.
    """
    _, B, L, D = states.shape
    inner = sum(leaf.size // len(leaf) // D for leaf in jax.tree.leaves(weights) if leaf.ndim > 3)
    tangent = 4 * B * 5 * D * D
    product = 4 * B * L * (3 * inner + 4 * D + 2 * L)
    half = memory * GIB / 2
    return Chunks(int(np.clip(half // tangent, 1, L)), int(np.clip(half // product, 1, D)))


def check_exponents_exist(config: ModelConfig) -> None:
    """Checks that a step goes from state to state (else: InputError)."""
    if remembered := find_scheme(config.scheme).remembers:
        raise InputError(
            "Lyapunov exponents are of steps from state to state, and model.scheme="
            f"{config.scheme} also remembers {remembered}; leave them out: analyze spectra"
        )


def _check_arguments(
    config: ModelConfig, tokens: Tokens, outputs: Int[np.ndarray, " B"], convention: str
) -> None:
    length = tokens.shape[1]
    if convention not in CONVENTIONS:
        raise InputError(
            f"convention {convention!r} is unknown; there are {', '.join(CONVENTIONS)}"
        )
    check_exponents_exist(config)
    scheme = find_scheme(config.scheme)
    is_eulers = scheme.layer == "parallel" and scheme.leaves is None
    if convention == "official" and not (source_of(config).any_time and is_eulers):
        raise InputError(
            "--convention=official needs Euler's scheme and weights at all t, and this model has "
            f"scheme {config.scheme} and {config.weights} weights; set --convention=pair or full"
        )
    if not 1 <= length <= config.max_length:
        raise InputError(f"a prompt has {length} tokens; the model takes 1 to {config.max_length}")
    if not ((outputs >= 0) & (outputs < length)).all():
        raise InputError(f"output tokens {outputs.tolist()} must be in [0, {length})")
