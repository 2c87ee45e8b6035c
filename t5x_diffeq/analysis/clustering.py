"""Particles under attention alone: do they cluster? (paper, section 5.1, appendix C.8)

    dx_i/dt = sum_j softmax_j(x_i^T Q(t)^T K(t) x_j / sqrt(d)) V(t) x_j,   W(t) = a(t) W

for W in {Q, K, V} with standard normal entries. Weights are constant, a(t) = 1, or grow as c t^p.
The paper takes 200 steps of dt = 1/200 over the depth t in [0, 1]: a horizon of 1. Our copy of it
lacks the sampling range, the distribution of the weights and c. Ours are choices, and `outcomes`
shows how the result depends on them and on a longer horizon. The choices of c:

    peak   a = 1 at the end: growing weights never exceed constant ones, and do 1 / (p + 1) of
           their work, which is the integral of a
    work   the integral of a equals that of constant weights: only the shape differs
    time   c = 1: a = t^p in units of the horizon's time, which soon exceeds all bounds
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from t5x_diffeq.model.layers.array_types import State, Weights
from t5x_diffeq.model.ode.integrate import trajectory
from t5x_diffeq.model.ode.solvers import VectorField, grid

POWERS = (0, 1, 2, 3, 4)  # 0: constant weights
_SCALES = ("peak", "work", "time")
LINK = 0.05  # particles closer than this times the root mean square of |x| are linked


@dataclass(frozen=True)
class Clustering:
    """Trajectories and how clustered they are; each seed draws its own weights and particles."""

    times: Float[np.ndarray, " states"]  # times of the states, in the units of the horizon
    states: Float[np.ndarray, "seeds states tokens dim"]
    # groups of particles linked by distances below `LINK` of the root mean square of |x|; like the
    # other measures, NaN where a particle overflows float32
    clusters: Float[np.ndarray, "seeds states"]
    # mean pairwise distance over the root mean square of |x|: 0 if all coincide
    spread: Float[np.ndarray, "seeds states"]
    distance: Float[np.ndarray, "seeds states"]  # mean pairwise distance over its initial value


def simulate_clustering(
    power: int = 0,
    *,
    seeds: int = 1,
    tokens: int = 40,
    dim: int = 3,
    steps: int = 200,
    horizon: float = 1.0,
    half_range: float = 1.0,
    scale: str = "peak",
) -> Clustering:
    """Integrates particles that start in a cube by Euler steps of horizon / steps; seeds 0, 1, ...

    Args:
      power: p of a(t) = c t^p; 0 for constant weights.
      seeds: number of draws of weights and particles, the same for every power.
      horizon: the final time, in the units in which weights are of size 1; the paper's is 1.
      half_range: particles start uniformly in [-half_range, half_range]^dim.
      scale: the choice of c: "peak", "work" or "time", see the top of this file.
    """
    samples = [draw_sample(seed, tokens, dim, half_range) for seed in range(seeds)]
    W, x = (jnp.asarray(np.stack(part), jnp.float32) for part in zip(*samples, strict=True))
    a = jnp.asarray(magnitudes(power, steps, horizon, scale), jnp.float32)
    states = np.asarray(_simulate(W, x, a, horizon / steps), np.float64)
    times = np.append(0.0, horizon * grid("euler", steps)[:, 0])
    clusters, spread, mean = np.stack([measure_state(x) for x in states], 1)
    distance = mean / np.maximum(mean[:, :1], np.finfo(float).tiny)
    return Clustering(times, states, clusters, spread, distance)


def magnitudes(power: int, steps: int, horizon: float, scale: str) -> Float[np.ndarray, " steps"]:
    """a(t) at the times at which the steps read their weights."""
    c = {"peak": 1.0, "work": power + 1.0, "time": float(horizon) ** power}[scale]
    return c * grid("euler", steps)[:, 0].astype(np.float64) ** power


def draw_sample(
    seed: int, tokens: int, dim: int, half_range: float
) -> tuple[Float[np.ndarray, "3 dim dim"], Float[np.ndarray, "tokens dim"]]:
    """Q, K, V and the particles of a seed."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(3, dim, dim))
    return weights, rng.uniform(-half_range, half_range, (tokens, dim))


@partial(jax.jit, static_argnames="dt")
def _simulate(
    W: Float[Array, "seeds 3 dim dim"],
    x: Float[Array, "seeds tokens dim"],
    scales: Float[Array, " steps"],
    dt: float,
) -> Float[Array, "seeds states tokens dim"]:
    field = VectorField(f=attention, g=lambda W, y: jnp.zeros_like(y))

    def simulate(W: Float[Array, "3 dim dim"], x: Float[Array, "tokens dim"]) -> Array:
        weights = {"qkv": scales[:, None, None, None] * W}
        states_of = partial(trajectory, scheme="euler", num_steps=len(scales), step_size=dt)
        return states_of(lambda args: lambda key: field, weights, x[None])[:, 0]

    return jax.vmap(simulate)(W, x)


def attention(W: Weights, y: State) -> State:
    """Attention of one head over all particles, without mask, norm or output kernel."""
    q, k, v = (y @ matrix.T for matrix in W["qkv"])
    scores = jnp.einsum("bid,bjd->bij", q, k) / y.shape[-1] ** 0.5
    return jax.nn.softmax(scores) @ v


def measure_state(x: Float[np.ndarray, "states tokens dim"]) -> Float[np.ndarray, "3 states"]:
    """Clusters, spread and mean pairwise distance of each state."""
    finite = np.isfinite(x).all((1, 2))
    x = np.where(finite[:, None, None], x, 0)
    distances = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1)
    size = np.maximum(np.sqrt(np.square(x).sum(-1).mean(-1)), np.finfo(float).tiny)
    clusters, mean = _count_clusters(distances < LINK * size[:, None, None]), distances.mean((1, 2))
    return np.where(finite, (clusters, mean / size, mean), np.nan)


def _count_clusters(linked: Bool[np.ndarray, "graphs tokens tokens"]) -> list[int]:
    """The number of connected components of each graph, given by its adjacency matrix."""
    graphs, tokens, _ = linked.shape
    graph, i, j = np.nonzero(linked)
    edges = (np.ones(len(graph)), (graph * tokens + i, graph * tokens + j))
    all_graphs = coo_array(edges, shape=(graphs * tokens,) * 2)
    _, labels = connected_components(all_graphs, directed=False)
    return [len(set(row)) for row in labels.reshape(graphs, tokens)]


def outcomes(
    scales: tuple[str, ...] = _SCALES,
    horizons: tuple[float, ...] = (1.0, 5.0, 10.0),
    half_ranges: tuple[float, ...] = (1.0, 5.0),
    *,
    seeds: int = 20,
    powers: tuple[int, ...] = POWERS,
) -> Iterator[dict[str, Any]]:
    """How the particles end up, for every choice, over the seeds; see `summarise_endings`."""
    for scale, horizon, half_range in product(scales, horizons, half_ranges):
        for power in powers:
            choice: dict[str, Any] = {"scale": scale, "horizon": horizon, "half_range": half_range}
            clustering = simulate_clustering(power, seeds=seeds, **choice)
            yield {**choice, "power": power, **summarise_endings(clustering)}


def summarise_endings(clustering: Clustering) -> dict[str, float]:
    """Medians over the seeds that stayed finite, and counts of seeds.

    Returns:
      `clusters`, `spread`, `distance`: medians at the end; `finite`: seeds that stayed finite;
      `few` and `one`: seeds that ended in at most 5 clusters, and in a single one.
    """
    last = clustering.clusters[:, -1]
    finite = np.isfinite(last)
    values = {
        "clusters": last,
        "spread": clustering.spread[:, -1],
        "distance": clustering.distance[:, -1],
    }
    medians = {
        name: float(np.median(x[finite])) if finite.any() else np.nan for name, x in values.items()
    }
    counts = {"finite": finite, "few": last <= 5, "one": last == 1}
    return {**medians, **{name: int(x.sum()) for name, x in counts.items()}}
