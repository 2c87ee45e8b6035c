"""The studies of structures and of repeated text choose their runs from the outcomes so far."""

import pytest
from helpers import ROOT

from studies import repeated_text, structures
from studies.structures import BUDGETS, WIDTHS, Structures
from t5x_diffeq.experiments.runs import read_results

SEEDS = range(3)
TEXTS = {"text": {"data.path": "/a"}}


def carry_out(experiment, outcome):
    """All runs, and the outcomes that `outcome` makes of them, as `reproduce` labels them."""
    done = {}
    while new := [run for run in experiment.runs(TEXTS, SEEDS, done) if run.name not in done]:
        done |= {run.name: outcome(run) for run in new}
    runs = experiment.runs(TEXTS, SEEDS, done)
    return runs, [{"run": run.name, **done[run.name], **run.labels} for run in runs]


def cost_of(run):
    """A loop's step has the FLOPs of GPT's, takes 1.25 times as long, and half the parameters."""
    is_loop = "-loop-" in run.name
    return {
        "model: parameters": 50 if is_loop and "parameters" not in run.name else 100,
        "adam: flops": 2e9 if "parameters" in run.name else 1e9,
        "model / baseline: step_ms": 1.25 if is_loop else 1.0,
    }


def loss_of(labels):
    """The best rate is 1.6e-2, and 8e-3 at width 48; a loop is ahead by 0.1."""
    best = 1.6e-2 if labels["width"] == 32 else 8e-3
    ahead = 0.1 if labels["model"] == "loop" else 0.0
    return 2 + abs(labels["learning_rate"] - best) + 0.01 * labels["seed"] - ahead


@pytest.fixture(scope="module")
def carried_out():
    return carry_out(
        Structures(),
        lambda run: cost_of(run) if run.verb == "benchmark" else {"loss": loss_of(run.labels)},
    )


def test_a_budget_determines_the_optimizer_steps(carried_out):
    runs, _ = carried_out
    steps = {
        (run.labels["width"], run.labels["model"], run.labels["budget"]): run.labels["total_steps"]
        for run in runs
        if run.labels
    }
    flops, parameters, time = BUDGETS
    assert (steps[32, "GPT", flops], steps[48, "GPT", flops]) == (360, 540)  # half of ladder.py's
    assert steps[32, "loop", flops] == 360
    assert steps[32, "loop", parameters] == 180  # which has twice the FLOPs
    assert steps[32, "loop", time] == round(360 / 1.25 / 10) * 10
    assert steps[32, "nested layers", flops] == 590  # of 2, 3 and 6 steps, 11 / 3 on average
    assert (32, "GPT", parameters) not in steps  # GPT has its own number of parameters
    assert len({model for _, model, _ in steps}) == 15


def test_every_model_has_three_seeds_at_the_best_rate(carried_out):
    _, outcomes = carried_out
    for width, best in zip(WIDTHS, (1.6e-2, 8e-3), strict=True):
        seeds = {}
        for each in outcomes:
            if each.get("width") == width:
                key = each["model"], each["budget"], each["learning_rate"]
                seeds.setdefault(key, set()).add(each["seed"])
        at_best = {key[:2] for key, found in seeds.items() if found == set(SEEDS)}
        assert {key[2] for key, found in seeds.items() if found == set(SEEDS)} == {best}
        assert at_best == {key[:2] for key in seeds}


def test_the_table_has_leads_over_gpt_paired_by_seed(carried_out, tmp_path):
    _, outcomes = carried_out
    first, second = Structures().notes(outcomes, tmp_path)
    assert first.startswith("text, width 32\n") and second.startswith("text, width 48\n")
    lines = {line.split(" | ")[0].strip("| "): line for line in first.splitlines()[2:]}
    mean = "2.0100 ± 0.0058"  # of 2, 2.01 and 2.02
    assert lines["GPT"] == f"| GPT | 1.00 | 1.00 | 1.00 | {mean} | {mean} | {mean} |"
    ahead = "1.9100 ± 0.0058 (0.1000 ± 0.0000)"
    assert lines["loop"] == f"| loop | 0.50 | 1.00 | 1.25 | {ahead} | {ahead} | {ahead} |"


def test_a_decay_is_swept_and_then_the_rate_at_the_best_one():
    def outcome(run):
        labels = run.labels
        distance = abs(labels["weight_decay"] - 1.5) + abs(labels["learning_rate"] - 8e-3)
        return {"loss": 9.0, "lowest": 2 + distance}

    runs, _ = carry_out(repeated_text.LAPTOP, outcome)
    tried = {(run.labels["weight_decay"], run.labels["learning_rate"]) for run in runs}
    decays = {decay for decay, rate in tried if rate == 1.6e-2}
    assert decays == {0.1, 0.5, 1.5, 3.0}  # so the best, 1.5, is inside
    assert {rate for decay, rate in tried if decay == 1.5} == {4e-3, 8e-3, 1.6e-2, 3.2e-2}
    best = [r for r in runs if (r.labels["weight_decay"], r.labels["learning_rate"]) == (1.5, 8e-3)]
    assert {run.labels["seed"] for run in best} == set(SEEDS)
    assert len({run.labels["model"] for run in best}) == len(repeated_text.LAPTOP.trainings)


def test_the_page_has_the_tables_of_the_kept_outcomes():
    done = read_results(ROOT / "docs" / "lab" / "outcomes" / "structures")
    experiment, texts = structures.LAPTOP, {"stdlib": {"data.source": "stdlib"}}
    runs = experiment.runs(texts, SEEDS, done)
    outcomes = [{**done[run.name], **run.labels} for run in runs if run.name in done]
    page = (ROOT / "docs" / "lab" / "structures.md").read_text()
    tables = [note.partition("\n\n")[2] for note in experiment.notes(outcomes, ROOT)]
    assert tables and all(table in page for table in tables)


def test_examples_that_the_study_names_exist():
    for width in WIDTHS:
        for name, each in structures.structures(width).items():
            for keys in (each.keys, each.with_parameters_of_gpt or {}):
                for value in keys.values():
                    if str(value).startswith("examples."):
                        module, _, attribute = value.partition("(")[0].partition(":")
                        found = __import__(module, fromlist=[attribute])
                        assert hasattr(found, attribute), (name, value)
