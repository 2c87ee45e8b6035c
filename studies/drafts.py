"""Speculative decoding by depth: some solver steps of a model draft, all of them verify.

A draft of k tokens and its verification are one compiled program (Leviathan et al. 2023). It takes
one sequence, and a scheme that evaluates f once a step.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from t5x_diffeq.inference.sampling import make_caches
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Cache, Places, Weights
from t5x_diffeq.model.ode.integrate import integrate_with_caches
from t5x_diffeq.model.ode.solvers import find_scheme
from t5x_diffeq.model.sub_fields import cached_sub_fields
from t5x_diffeq.system.errors import InputError

# Which of the N steps draft. `coarse`: the steps of a coarser grid, with caches of their own.
# `shared`: the same steps, with the caches of the N steps. `middle`: the middle step of each group
# of steps, with the caches of the N steps. `exit`: the first steps, of the trained size.
DRAFTS = ("coarse", "shared", "middle", "exit")


class Drafter(NamedTuple):
    """The solver steps that draft, and how many tokens they draft.

    Attributes:
      steps: the numbers of the model's steps that give the weights.
      step_size: the size of a step.
      shares: whether it reads and writes the model's caches of these steps; else it has its own.
      tokens: how many tokens it drafts.
    """

    steps: tuple[int, ...]
    step_size: float
    shares: bool
    tokens: int


def drafter_of(model: LanguageModel, draft: str, steps: int, tokens: int) -> Drafter:
    """The drafter with `steps` of the model's N steps; `draft` is one of `DRAFTS`."""
    c = model.config
    if find_scheme(c.scheme).evaluations[0] != 1 or find_scheme(c.scheme).nodes != (1.0,):
        raise InputError(f"scheme={c.scheme}: the study needs euler or lie_trotter")
    if draft == "exit":
        return Drafter(tuple(range(steps)), c.dt, True, tokens)
    every, rest = divmod(c.num_steps, steps)
    if rest:
        raise InputError(f"--draft_steps={steps} doesn't divide the {c.num_steps} steps; it must")
    first = (every - 1) // 2 if draft == "middle" else every - 1
    chosen = tuple(range(first, c.num_steps, every))
    return Drafter(chosen, every * c.dt, draft != "coarse", tokens)


def logits_of_steps(
    model: LanguageModel,
    step_size: float,
    params: dict,
    weights: list[Weights],
    tokens: Int[Array, " L"],
    first: Int[Array, ""],
    caches: list[Cache],
) -> tuple[Float[Array, "L V"], list[Cache]]:
    """The logits after each of the tokens at `first` and on, with these steps; and the caches."""

    def read(self: LanguageModel) -> tuple[Array, list[Cache]]:
        places = Places(first + jnp.arange(len(tokens))[None])
        y, after = integrate_with_caches(
            *cached_sub_fields(self.config, places, jnp.ones((1, len(tokens)), bool)),
            weights,
            self.embed(tokens[None], places),
            caches,
            scheme=self.config.scheme,
            step_size=step_size,
        )
        return self.logits(self.normalise(y))[0], after

    return nn.apply(read, model)({"params": params})


def probabilities(logits: Float[Array, "*L V"], temperature: float) -> Float[Array, "*L V"]:
    """The probabilities of a token; at temperature 0, one token has probability 1."""
    if temperature == 0:
        return jax.nn.one_hot(logits.argmax(-1), logits.shape[-1])
    return jax.nn.softmax(logits / temperature)


def draw(p: Float[Array, " V"], temperature: float, key: Array) -> Int[Array, ""]:
    """A token with these probabilities."""
    token = p.argmax() if temperature == 0 else jax.random.categorical(key, jnp.log(p))
    return token.astype(jnp.int32)


def accept(
    p: Float[Array, "_ V"],
    q: Float[Array, "K V"],
    drafted: Int[Array, " K"],
    temperature: float,
    key: Array,
) -> tuple[Int[Array, " _"], Int[Array, ""]]:
    """The drafted tokens, with the fine grid's token after the accepted ones; and their number n.

    Tokens 0 to n are the new tokens. Drafted token i is accepted with probability
    min(1, p_i / q_i). The token after the accepted ones is drawn from max(0, p - q), normalised, or
    from p if all are accepted.
    """
    uniform_key, key = jax.random.split(key)
    at = jnp.arange(len(drafted))
    u = jax.random.uniform(uniform_key, drafted.shape)
    count = jnp.cumprod(u * q[at, drafted] < p[at, drafted]).sum()
    rest = jnp.maximum(p - jnp.pad(q, ((0, 1), (0, 0))), 0)[count]
    next_token = draw(rest / rest.sum(), temperature, key)
    return jnp.pad(drafted, (0, 1)).at[count].set(next_token), count


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("caches", "own"))
def speculate(
    model: LanguageModel,
    drafter: Drafter,
    temperature: float,
    params: dict,
    weights: list[Weights],
    last: Int[Array, " 2"],
    position: Int[Array, ""],
    key: Array,
    caches: list[Cache],
    own: list[Cache],
) -> tuple[Int[Array, " _"], Int[Array, ""], list[Cache], list[Cache]]:
    """One draft, verified: new tokens, of which `accept` says how many count; and the caches.

    Args:
      last: the two last tokens, the last of which is in no cache yet.
      position: the position of the last token.
      own: the drafter's own caches; [] if it shares the model's.
    """
    keys = jax.random.split(key, drafter.tokens + 1)
    chosen = [weights[n] for n in drafter.steps]
    memory = [caches[n] for n in drafter.steps] if drafter.shares else own
    # The drafter's own caches may lack the token before the last, so it is read again.
    tokens, first = (last[1:], position) if drafter.shares else (last, position - 1)
    drafted, q = [], []
    for n in range(drafter.tokens):
        logits, memory = logits_of_steps(
            model, drafter.step_size, params, chosen, tokens, first, memory
        )
        q.append(probabilities(logits[-1], temperature))
        drafted.append(draw(q[-1], temperature, keys[n]))
        tokens, first = drafted[-1][None], position + n + 1
    if drafter.shares:  # the pass below overwrites the draft's entries
        for n, cache in zip(drafter.steps, memory, strict=True):
            caches[n] = cache
    draft = jnp.stack(drafted)
    logits, caches = logits_of_steps(
        model,
        model.config.dt,
        params,
        weights,
        jnp.concatenate((last[1:], draft)),
        position,
        caches,
    )
    p = probabilities(logits, temperature)
    tokens, count = accept(p, jnp.stack(q), draft, temperature, keys[-1])
    return tokens, count, caches, [] if drafter.shares else memory


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames="caches")
def several(
    model: LanguageModel,
    count: int,
    temperature: float,
    params: dict,
    weights: list[Weights],
    token: Int[Array, ""],
    position: Int[Array, ""],
    key: Array,
    caches: list[Cache],
) -> tuple[Int[Array, " K"], list[Cache]]:
    """`count` tokens of plain generation in one program."""
    tokens = [token]
    for n, each in enumerate(jax.random.split(key, count)):
        logits, caches = logits_of_steps(
            model, model.config.dt, params, weights, tokens[-1][None], position + n, caches
        )
        tokens.append(draw(probabilities(logits[0], temperature), temperature, each))
    return jnp.stack(tokens[1:]), caches


def start(
    model: LanguageModel,
    step_size: float,
    params: dict,
    weights: list[Weights],
    prompt: list[int],
) -> list[Cache]:
    """The caches of these steps with the prompt."""
    caches = make_caches(model, 1, model.config.max_length)[: len(weights)]
    _, caches = _read(model, step_size, params, weights, jnp.asarray(prompt), jnp.int32(0), caches)
    return caches


_read = jax.jit(logits_of_steps, static_argnums=(0, 1), donate_argnames="caches")


def by_drafts(
    model: LanguageModel,
    params: dict,
    weights: list[Weights],
    drafter: Drafter,
    temperature: float,
    prompt: list[int],
    key: Array,
) -> Iterator[tuple[list[int], int]]:
    """The new tokens of each draft, and how many of them were drafted; without an end."""
    caches = start(model, model.config.dt, params, weights, prompt)
    chosen = [weights[n] for n in drafter.steps]
    own = [] if drafter.shares else start(model, drafter.step_size, params, chosen, prompt)
    last = [*prompt]
    for n in range(model.config.max_length):
        tokens, count, caches, own = speculate(
            model,
            drafter,
            temperature,
            params,
            weights,
            np.asarray(last[-2:], np.int32),
            np.int32(len(last) - 1),
            jax.random.fold_in(key, n),
            caches,
            own,
        )
        accepted = int(count)
        new = np.asarray(tokens)[: accepted + 1].tolist()
        last += new
        yield new, accepted


def plainly(
    model: LanguageModel,
    params: dict,
    weights: list[Weights],
    count: int,
    temperature: float,
    prompt: list[int],
    key: Array,
) -> Iterator[tuple[list[int], int]]:
    """`count` new tokens at a time, none of them drafted; without an end."""
    caches = start(model, model.config.dt, params, weights, prompt)
    last = [*prompt]
    for n in range(model.config.max_length):
        tokens, caches = several(
            model,
            count,
            temperature,
            params,
            weights,
            np.int32(last[-1]),
            np.int32(len(last) - 1),
            jax.random.fold_in(key, n),
            caches,
        )
        new = np.asarray(tokens).tolist()
        last += new
        yield new, 0
