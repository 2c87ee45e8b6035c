"""The ladder of sizes: which runs it asks for, its rule for rates, leads, and phi."""

import json

import numpy as np
import pytest

from t5x_diffeq.experiments.ladder import MODELS, WIDTHS, Ladder, Size, fit_phi, rate_by_rule
from t5x_diffeq.runtime.config_files import load_config

LADDER = Ladder()
TEXTS = {"stdlib": {"data.source": "stdlib"}}
BEST = {"baseline": (4e-3, 2e-3)}  # on the first two rungs; others: 4e-3 on both


def loss_of(labels):
    """The lead of `shared` is negative, of the others 0.1 per rung; the best rate is a valley."""
    rung = WIDTHS.index(labels["width"])
    best = BEST.get(labels["model"], (4e-3, 4e-3))
    rate = rate_by_rule(*best, labels["width"])
    lead = {"baseline": 0.0, "shared": -0.2}.get(labels["model"], 0.1 * rung)
    off = abs(np.log2(labels["learning_rate"] / rate))
    return 2.0 - 0.1 * rung + 0.01 * labels["seed"] - lead + off


def carry_out_all(folder=None):
    """The outcomes of all rounds, and how many runs each round added."""
    done, sizes = {}, []
    while missing := [r for r in LADDER.runs(TEXTS, range(3), done) if r.name not in done]:
        sizes.append(len(missing))
        for run in missing:
            done[run.name] = {"run": run.name, **run.labels, "loss": loss_of(run.labels)}
            if folder:
                keys = load_config(run.arguments[0].partition("=")[2]).flat()
                (folder / run.name).mkdir()
                (folder / run.name / "hyperparameters.json").write_text(json.dumps(keys))
    return list(done.values()), sizes


def test_rounds_go_from_the_smallest_size():
    outcomes, sizes = carry_out_all()
    assert sizes[0] == 12  # two rates of six models on the first rung
    widths = [each["width"] for each in outcomes]
    assert widths == sorted(widths)
    largest = [each for each in outcomes if each["width"] == 768]
    assert {each["model"] for each in largest} == set(MODELS)
    assert {each["seed"] for each in largest} == {0}
    of_second = [e for e in outcomes if e["width"] == 96 and e["model"] == "compact"]
    assert sorted((e["learning_rate"], e["seed"]) for e in of_second) == [
        (2e-3, 0),
        *((4e-3, seed) for seed in range(3)),
        (8e-3, 0),
    ]
    rates = [e["learning_rate"] for e in largest if e["model"] == "baseline"]
    assert rates == [pytest.approx(2e-3 * 96 / 768, rel=0.01)]  # no faster than 1 / width


def test_leads_are_paired_and_phi_needs_enough_runs(tmp_path):
    outcomes, _ = carry_out_all(tmp_path)
    leads, phi = LADDER.notes(outcomes, tmp_path)
    line = next(line for line in leads.splitlines() if "stdlib, compact |" in line)
    assert line.split("|")[2:5] == [" 0.0000 ± 0.0000 ", " 0.1000 ± 0.0000 ", " 0.2000 "]
    assert "stdlib, shared" in phi
    few = [each for each in outcomes if each["width"] == 64]
    assert "too few runs" in LADDER.notes(few, tmp_path)[1]


@pytest.mark.parametrize("phi", [0.1, 0.46, 0.9])
def test_phi_of_losses_that_follow_the_law(phi):
    rng, runs = np.random.default_rng(0), ([], [])
    for width, steps in ((64, 6), (96, 8), (144, 10), (192, 12), (384, 12)):
        for number, exponent in enumerate((1, phi)):
            size = Size(12.0 * width**2, steps, 240.0 * width**2 * steps)
            law = 60 * (size.layer * steps**exponent) ** -0.4 + 90 * size.tokens**-0.4
            runs[number].append((size, 1.2 + law + 1e-4 * rng.normal()))
    value, error = map(float, fit_phi(*runs).split(" ± "))
    assert abs(value - phi) < max(3 * error, 0.02)
    assert error < 0.1
    assert fit_phi(runs[0][:2], runs[1]) == "too few runs"


def test_a_model_ahead_of_any_number_of_layers_has_no_phi():
    sizes = [Size(12.0 * w**2, 6, 2e3 * w**2) for w in (64, 96, 144, 192)]
    unique = [(size, 1 + 40 * (6 * size.layer) ** -0.4) for size in sizes]
    assert fit_phi(unique, [(size, loss - 0.3) for size, loss in unique]).startswith("beyond 2")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("model", MODELS)
def test_every_rung_is_a_config(model, width):
    config = load_config(f"configs/ladder.py:{model}-{width}")
    kernels = 12 * config.model.num_steps * width**2
    tokens = config.train.total_steps * config.train.batch_size * config.data.sequence_length
    assert tokens == pytest.approx(20 * kernels, rel=0.01)
