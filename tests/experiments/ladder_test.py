"""The ladder of sizes: which runs it asks for, its rule for rates, leads, slopes, and phi."""

from math import inf, log

import numpy as np
import pytest

from studies.ladder import BASELINES, MODELS, WIDTHS, Ladder, rate_by_rule
from studies.ladder_fits import RungRun, fit_phi, lead_at_equal_parameters, phi_by_layers, slope
from t5x_diffeq.config.config_files import load_config

LADDER = Ladder()
TEXTS = {"stdlib": {"data.source": "stdlib"}}
BEST = {"baseline": (4e-3, 2e-3)}  # on the first two rungs; others: 4e-3 on both


def loss_of(labels):
    """The lead of `shared` is negative, of the others 0.1 per rung; the best rate is a valley."""
    rung, model = WIDTHS.index(labels["width"]), labels["model"].partition(",")[0]
    best = BEST.get(model, (4e-3, 4e-3))
    rate = best[rung] if rung < 2 else rate_by_rule(*best, labels["width"])
    lead = {"baseline": 0.0, "shared": -0.2}.get(model, 0.1 * rung)
    if "layers" in labels["model"]:
        lead = 0.1 * log(labels["num_steps"] / 6)
    off = abs(np.log2(labels["learning_rate"] / rate))
    return 2.0 - 0.1 * rung + 0.01 * labels["seed"] - lead + off


def carry_out_all():
    """The outcomes of all rounds, and how many runs each round added."""
    done, sizes = {}, []
    while missing := [r for r in LADDER.runs(TEXTS, range(3), done) if r.name not in done]:
        sizes.append(len(missing))
        for run in missing:
            done[run.name] = {"run": run.name, **run.labels, "loss": loss_of(run.labels)}
    return list(done.values()), sizes


def test_rounds_go_from_the_smallest_size():
    outcomes, sizes = carry_out_all()
    assert sizes[0] == 14  # two rates of seven models on the first rung
    widths = [each["width"] for each in outcomes]
    assert widths == sorted(widths)
    largest = [each for each in outcomes if each["width"] == 768]
    assert {each["model"] for each in largest} == set(MODELS)
    assert {each["seed"] for each in largest} == {0}
    of_second = [e for e in outcomes if e["width"] == WIDTHS[1] and e["model"] == "compact"]
    assert sorted((e["learning_rate"], e["seed"]) for e in of_second) == [
        (2e-3, 0),
        *((4e-3, seed) for seed in range(3)),
        (8e-3, 0),
    ]
    of_layers = [e for e in outcomes if e["model"] in BASELINES]
    assert len(of_layers) == 2 * 3 * len(BASELINES)  # on two rungs, at the baseline's rate
    assert {(e["width"], e["learning_rate"]) for e in of_layers} == {(32, 4e-3), (48, 2e-3)}
    rates = [e["learning_rate"] for e in largest if e["model"] == "baseline"]
    assert rates == [pytest.approx(2e-3 * 48 / 768, rel=0.01)]  # no faster than 1 / width


def rung_run(loss, steps, width=32, model="baseline", tokens=1e6, **rest):
    parameters = int(12 * width**2 * steps)
    values = {"text": "a", "seed": 0, "parameters": parameters, **rest}
    return RungRun(model=model, width=width, loss=loss, steps=steps, tokens=tokens, **values)


RUNG = [rung_run(2.4, 1), rung_run(2.2, 3), rung_run(2.0, 6), rung_run(1.9, 12)]


def test_phi_is_the_layers_that_have_the_loss():
    for loss, layers in ((2.4, 1), (2.2, 3), (2.1, 3 * 2**0.5), (2.0, 6), (1.9, 12)):
        run = rung_run(loss, 6, model="shared")
        assert phi_by_layers(RUNG, run) == pytest.approx(log(layers) / log(6))
    assert phi_by_layers(RUNG, rung_run(2.5, 6, model="shared")) == -inf
    assert phi_by_layers(RUNG, rung_run(1.8, 6, model="shared")) == inf
    assert phi_by_layers(RUNG[:1], rung_run(2.0, 6, model="shared")) is None
    assert phi_by_layers(RUNG, rung_run(2.0, 6, model="shared", seed=1)) is None


def test_the_lead_at_equal_parameters():
    run = rung_run(2.0, 6, model="compact", parameters=12 * 32**2 * 3)
    assert lead_at_equal_parameters(RUNG, run) == pytest.approx(0.2)
    assert lead_at_equal_parameters(RUNG, run._replace(parameters=10**9)) is None


@pytest.mark.parametrize("phi", [0.1, 0.46, 0.9])
def test_phi_of_losses_that_follow_the_law(phi):
    rng = np.random.default_rng(0)

    def run(width, layers, tokens, exponent=1.0):
        law = 60 * (12 * width**2 * layers**exponent) ** -0.4 + 90 * tokens**-0.4
        return rung_run(1.2 + law + 1e-4 * rng.normal(), layers, width, tokens=tokens)

    rungs = [(width, 6, 240.0 * width**2 * 6) for width in (32, 48, 64, 96)]
    unique = [run(w, layers, D) for w, n, D in rungs for layers in (1, 2, 3, n, 12)]
    shared = [run(w, n, D, phi) for w, n, D in rungs]
    value, error = map(float, fit_phi(unique, shared).split(" ± "))
    assert abs(value - phi) < max(3 * error, 0.02)
    assert error < 0.1
    assert fit_phi(unique[:2], shared[:2]) == "too few runs"
    line = [x for x in unique if x.steps == 6]
    assert fit_phi(line, shared) == "all baselines have the same tokens per parameter"


def test_the_slope_and_its_error():
    x = list(map(float, range(8)))
    value, error = slope(x, [2 * each + 1 + 0.1 * (-1) ** each for each in x])
    assert value == pytest.approx(2, abs=3 * error)
    assert 0.005 < error < 0.05
    assert slope([1, 1, 1], [1, 2, 3]) is None


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("model", sorted({variant for variant, _ in MODELS.values()}))
def test_every_rung_is_a_config(model, width):
    config = load_config(f"configs/ladder.py:{model}-{width}")
    kernels = 12 * config.model.num_steps * width**2
    tokens = config.train.total_steps * config.train.batch_size * config.data.sequence_length
    assert tokens == pytest.approx(20 * kernels, rel=0.01)
