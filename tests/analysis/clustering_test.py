"""Particles: the equation in plain NumPy, measures on known shapes, and what the seeds do."""

import numpy as np
import pytest

from t5x_diffeq.analysis.clustering import (
    draw_sample,
    magnitudes,
    measure_state,
    simulate_clustering,
    summarise_endings,
)


def test_equals_numpy():
    small = {"tokens": 5, "steps": 8, "horizon": 2.0, "half_range": 2.0}
    found = simulate_clustering(2, seeds=2, **small)
    (Q, K, V), x = draw_sample(1, 5, 3, 2.0)
    for n in range(8):
        a = ((n + 1) / 8) ** 2
        velocity = np.zeros_like(x)
        for i in range(5):
            scores = np.array([(a * Q @ x[i]) @ (a * K @ x[j]) / np.sqrt(3) for j in range(5)])
            weights = np.exp(scores - scores.max())
            velocity[i] = sum(w * a * V @ x[j] for j, w in enumerate(weights / weights.sum()))
        x = x + 2.0 / 8 * velocity
    np.testing.assert_allclose(found.states[1, -1], x, atol=1e-5)
    np.testing.assert_allclose(found.times, np.arange(9) / 4)
    assert found.states.shape == (2, 9, 5, 3) and found.clusters.shape == (2, 9)


def test_scales():
    peak, work, time = (magnitudes(3, 1000, 5.0, s) for s in ("peak", "work", "time"))
    assert peak[-1] == 1 and time[-1] == pytest.approx(125) and work[-1] == 4
    assert work.mean() == pytest.approx(1, rel=3e-3)
    assert (magnitudes(0, 10, 5.0, "time") == 1).all()


def test_measures_of_known_shapes():
    three = np.repeat(np.eye(3), 4, axis=0)
    one = np.ones((12, 3))
    chain = np.zeros((12, 3))
    chain[:, 0] = 1 + 0.04 * np.arange(12)  # linked one by one, though the ends are far apart
    lost = np.full((12, 3), np.inf)
    found = measure_state(np.stack((three, one, chain, 1e9 * three, lost)))
    np.testing.assert_array_equal(found[0], (3, 1, 1, 3, np.nan))
    assert found[1, 3] == pytest.approx(found[1, 0])  # of no unit
    assert (found[1:, 1] == 0).all() and np.isnan(found[:, 4]).all()


def test_what_constant_and_growing_weights_do():
    """20 seeds, 40 particles, 200 steps: the paper's outcome, and that equal work undoes it."""
    few = {
        (power, scale): summarise_endings(
            simulate_clustering(power, seeds=20, scale=scale, horizon=10.0)
        )["few"]
        for power, scale in ((0, "peak"), (4, "peak"), (4, "work"))
    }
    assert few[0, "peak"] >= 10
    assert few[4, "peak"] <= 2
    assert few[4, "work"] >= 10
