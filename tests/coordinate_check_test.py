"""One learning rate serves every width of the time embedding, and every number of solver steps."""

import dataclasses

import pytest
from small_models import SMALL

from t5x_diffeq.benchmarks.coordinate_check import coordinate_check

MODEL = dataclasses.replace(SMALL, embed_dim=32, mlp_dim=64, num_steps=2, num_frequencies=32)


def spread(rows, key):
    values = [row[key] for row in rows]
    return max(values) / min(values)


@pytest.mark.slow
@pytest.mark.parametrize("basis", ["sinusoids", "legendre:6", "table:4"])
def test_movement_is_the_same_for_every_width(basis):
    rows = coordinate_check(dataclasses.replace(MODEL, time_basis=basis), values=(8, 144))
    assert all(spread(rows, key) < 1.35 for key in ("start", "after_1", "after_10"))


@pytest.mark.slow
def test_and_does_with_the_papers_initialisation():
    rows = coordinate_check(dataclasses.replace(MODEL, init="paper"), values=(8, 144))
    assert spread(rows, "start") > 5
    assert spread(rows, "after_10") > 2


@pytest.mark.slow
def test_the_state_moves_equally_far_for_every_number_of_steps():
    rows = coordinate_check(MODEL, "N", values=(2, 16))
    assert all(spread(rows, key) < 1.4 for key in ("y_after_1", "y_after_10"))
    classical = dataclasses.replace(MODEL, weights="per_layer", step_size="1")
    assert spread(coordinate_check(classical, "N", values=(2, 16)), "y_after_1") > 2
