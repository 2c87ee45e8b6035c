"""The list of checks: for each row a config that it refuses, and the verbs that it concerns."""

from itertools import pairwise

import jax
import pytest

from t5x_diffeq.config.config import Config
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.checks import CHECKS, run_checks
from t5x_diffeq.training.terms import LogitsTerm

VERBS = ("train", "finetune", "benchmark", "plan", "convert", "sweep", "launch")
NO_PLAN = tuple(verb for verb in VERBS if verb != "plan")
NO_SWEEP = tuple(verb for verb in VERBS if verb != "sweep")


class Weightless(LogitsTerm):
    name = "weightless"


STREAM = {"data.source": "stream", "data.path": "x"}
FILES = {"data.source": "text_files", "data.path": "a"}
AVERAGES = "examples.depth.averages_over_depth:averages"
ROWS = [  # in the order of the list: values of keys, what is said, and to which verbs
    ({"model.scan_unroll": 99}, "model.scan_unroll=99 is more than", VERBS),
    ({"train.terms": (f"{__name__}:Weightless(weight=0)",)}, "its weight is 0;", NO_SWEEP),
    ({"train.velocity_penalty": 0.1, "model.scheme": AVERAGES}, "integral along", VERBS),
    ({"model.adapter_rank": 10**6, "model.weights": "per_layer"}, "the rank that a", VERBS),
    ({"train.distill_weight": 0.9}, "does nothing without train.distill_from; set", VERBS),
    ({"train.keep_every": 7, "train.checkpoint_every": 300}, "keep_every=7 keeps no", VERBS),
    ({"data.path": "a.txt"}, "data.path=a.txt is set, and", NO_PLAN),
    ({"train.depths": (3, 4)}, "never train model.num_steps=12, with", VERBS),
    ({"train.depths": (12,), "model.weights": "per_layer"}, "only at their own nodes", VERBS),
    ({"train.depths_distill": 0.5}, "needs several depths in one", VERBS),
    ({**STREAM, "data.packing": "first_fit"}, "the lengths of all documents", NO_PLAN),
    ({"train.profile": "9:3"}, "such as 100:105", NO_PLAN),
    ({"train.figure_every": 1, "train.trackers": ()}, "a tracker that shows", NO_PLAN),
    ({"train.distill_from": "nowhere"}, "nowhere holds no run", ("train", "finetune")),
    ({"init_from": "nobody"}, "nobody has lost its tokenizer/", ("finetune",)),
    ({"train.trackers": ("wandb",)}, "wandb needs the package wandb", ("train",)),
]
OF_NEW_RUNS = 8  # so many rows at the beginning


def said_to(verb, values, new=True):
    """What is said of a config with these values."""
    try:
        run_checks(verb, Config().with_values(values), new=new)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("row", "case"), enumerate(ROWS), ids=lambda each: str(each)[:30])
def test_a_row_concerns_its_verbs(row, case, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    values, text, verbs = case
    for verb in VERBS:
        assert (text in said_to(verb, values)) == (verb in verbs), verb
    assert (text in said_to(verbs[0], values, new=False)) == (row >= OF_NEW_RUNS)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"init_step": 3}, "init_step=3 does nothing without init_from"),
        ({"train.eval_averages": True}, "does nothing without train.ema_decay; set"),
        ({"train.sample_prompts": ("Once",)}, "does nothing without train.sample_every; set"),
        ({"train.depths_per_step": 2}, "without train.depths"),
        ({"train.keep_every": 1500}, ""),
        ({"train.keep_every": 250}, ""),
        ({"train.keep_every": 7}, "keep_every=7 keeps none"),
        ({"train.keep_every": 5000}, ""),  # a try of a longer run's config
        (  # the last step is saved
            {"train.keep_every": 7, "train.checkpoint_every": 30, "train.total_steps": 140},
            "",
        ),
        ({"train.depths": (3, 4), "train.depths_until": 0.5}, ""),
        ({"train.depths": (3, 24)}, ""),
        ({**FILES, "data.train_split": "train[:9%]"}, "data.source=text_files has no splits"),
        ({"data.validation_split": "0.2"}, "data.source=stdlib has no splits; leave it out"),
        ({**FILES, "data.source": "tokens", "data.train_split": "train[:9%]"}, ""),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(values, text):
    said = said_to("sweep", {"train.total_steps": 1500} | values)
    assert text in said and bool(text) == bool(said)


def test_the_first_mistake_is_named():
    """Whatever else is wrong: of two rows, the one that stands first in the list speaks."""
    for (first, text, _), (second, *_) in pairwise(ROWS[3:]):
        if not first.keys() & second.keys() and "data.source" not in first:
            verb = "finetune" if "init_from" in first | second else "train"
            assert text in said_to(verb, {**second, **first}), (first, second)


def test_the_list_goes_from_what_needs_least_to_what_needs_most():
    needs = [row.needs for row in CHECKS]
    assert needs == sorted(needs) and {*needs} == {1, 2, 3}
    assert [row.needs for row in CHECKS].count(1) == len(ROWS) + 1  # 64 bits, below
    assert {*VERBS} == {verb for row in CHECKS for verb in row.verbs}


def test_a_training_in_64_bits_is_refused():
    with jax.enable_x64(True):
        for verb in VERBS:
            said = "JAX computes in 64 bits (JAX_ENABLE_X64, " in said_to(verb, {})
            assert said == (verb in ("train", "finetune", "benchmark")), verb
