"""One learning rate serves every width of the time embedding, with the default initialisation."""

import dataclasses

import pytest
from small_models import SMALL

from t5x_diffeq.benchmarks.coordinate_check import coordinate_check

MODEL = dataclasses.replace(SMALL, embed_dim=32, mlp_dim=64, num_steps=2, num_frequencies=32)


def spread(rows, key):
    values = [row[key] for row in rows]
    return max(values) / min(values)


@pytest.mark.slow
def test_movement_is_the_same_for_every_width():
    rows = coordinate_check(MODEL, widths=(8, 144))
    assert all(spread(rows, key) < 1.35 for key in ("start", "after_1", "after_10"))


@pytest.mark.slow
def test_and_does_with_the_papers_initialisation():
    rows = coordinate_check(dataclasses.replace(MODEL, init="paper"), widths=(8, 144))
    assert spread(rows, "start") > 5
    assert spread(rows, "after_10") > 2
