"""The model that comes with a clone: this version reads it as the one that wrote it did."""

import numpy as np
import pytest
from helpers import ROOT

import t5x_diffeq as td

WORKDIR = ROOT / "examples" / "smooth"
TEXT = 'def main():\n    """Print the lines of a file."""\n    for line in open(path):\n'
LOSSES = {
    2: 4.185638,
    3: 2.930456,
    6: 2.675036,
    12: 2.753553,
}  # nats per token, by the number of solver steps
CONTINUED = "        return self.path.path."  # the likeliest tokens


def files():
    return {path: path.stat().st_mtime_ns for path in WORKDIR.rglob("*")}


@pytest.mark.slow
def test_the_model_of_the_clone():
    before = files()
    run = td.load(WORKDIR)
    for num_steps, loss in LOSSES.items():
        np.testing.assert_allclose(run.at_depth(num_steps).loss(TEXT), loss, rtol=1e-4)
    assert run.generate(TEXT, max_tokens=8, temperature=0) == TEXT + CONTINUED
    assert files() == before
