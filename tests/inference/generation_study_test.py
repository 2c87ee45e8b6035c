"""The study of generation: the figures that it prints, and that all ways make tokens."""

import json
import re
from types import SimpleNamespace

import pytest
from helpers import call
from small_models import small

from studies import generation


def test_every_figure(monkeypatch, capsys):
    rates = {"cached": 100.0, "reread": 25.0, "reread_weights_kept": 50.0}
    monkeypatch.setattr(generation, "generation_rates", lambda model, rounds: rates)
    monkeypatch.setattr(generation, "make_setup", lambda *_: SimpleNamespace(model=None))
    call(generation, "--config=configs/tiny.py:ode", "--rounds=3")
    out, err = capsys.readouterr()
    assert json.loads(out) == {f"{name}/tokens_per_second": rate for name, rate in rates.items()}
    assert [re.split("  +", line) for line in err.splitlines()] == [
        ["cached", "100.0 tokens/s"],
        ["reread", "25.0 tokens/s", "4.0 times slower"],
        ["reread_weights_kept", "50.0 tokens/s", "2.0 times slower"],
    ]


@pytest.mark.slow
def test_all_ways_are_timed():
    rates = generation.generation_rates(small(max_length=24), rounds=3)
    assert rates.keys() == {"cached", "reread", "reread_weights_kept"}
    assert min(rates.values()) > 0
