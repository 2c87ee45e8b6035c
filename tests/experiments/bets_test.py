"""The bets' page follows from the outcomes that a clone has, and these are not run again."""

import re
from collections import defaultdict
from itertools import product
from math import sqrt
from statistics import mean, stdev

import pytest
from helpers import ROOT

from studies import many_depths, read_twice, repeated_text, two_kernels
from t5x_diffeq.experiments.runs import read_results

OUTCOMES = ROOT / "docs" / "lab" / "outcomes" / "bets"
STDLIB = {"stdlib": {"data.source": "stdlib"}}
SHAKESPEARE = {"shakespeare": {"data.source": "text_files", "data.path": "shakespeare.txt"}}
STUDIES = {
    "many_depths": (many_depths.LAPTOP, STDLIB),
    "repeated_text": (repeated_text.LAPTOP, SHAKESPEARE),
    "two_kernels": (two_kernels.LAPTOP, STDLIB),
    "read_twice": (read_twice.LAPTOP, STDLIB),
}


@pytest.fixture(scope="module")
def done():
    return read_results(OUTCOMES)


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_of_a_study_is_among_the_outcomes(name, done):
    experiment, texts = STUDIES[name]
    runs = experiment.runs(texts, range(experiment.seeds), done)
    assert len(runs) > 20 and [run.name for run in runs if run.name not in done] == []


def test_the_means_of_the_page_are_those_of_the_outcomes(done):
    by_run = defaultdict(list)
    for name in sorted(done):
        by_run[re.sub(r"seed=\d+", "", name)].append(done[name])
    means = set()
    for outcomes, seeds in product(by_run.values(), (3, 5)):
        for key in ("loss", "lowest", "2 steps", "3 steps", "6 steps"):
            values = [each[key] for each in outcomes[:seeds] if key in each]
            if len(values) == seeds:
                means.add(f"{mean(values):.4f} ± {stdev(values) / sqrt(seeds):.4f}")
    page = (ROOT / "docs" / "lab" / "bets.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    shown = re.findall(r"\d\.\d{4} ± \d\.\d{4}", "\n".join(rows))
    assert len(shown) > 50 and [each for each in shown if each not in means] == []
