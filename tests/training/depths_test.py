"""Training at several numbers of steps."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import setup_of

from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.checks import run_checks
from t5x_diffeq.training.depths import (
    depths_of,
    depths_to_come,
    full_grid_from,
    rows_of_depths,
)
from t5x_diffeq.training.load import load_run
from t5x_diffeq.training.tracking.jsonl import read_metrics

SEVERAL = {"train.depths": (2, 4), "train.depths_per_step": 2}


def test_drawn_by_seed_and_step_alone(small):
    small.train.update(depths=(1, 3, 3, 3), total_steps=400, depths_until=0.5)
    drawn = [depths_of(Config.of(small), step) for step in range(1, 401)]
    assert drawn == [depths_of(Config.of(small), step) for step in range(1, 401)]
    assert set(drawn[200:]) == {(2,)}  # model.num_steps
    counts = Counter(drawn[:200])
    assert counts.keys() == {(1,), (3,)}
    assert 0.65 < counts[3,] / 200 < 0.85
    assert depths_to_come(Config.of(small), 0) == [(1,), (2,), (3,)]
    assert depths_to_come(Config.of(small), 200) == [(2,)]
    small.train.depths_per_step = 2
    assert depths_of(Config.of(small), 7) == (1, 3)
    small.seed, small.train.depths_per_step = 1, 1
    assert drawn[:200] != [depths_of(Config.of(small), step) for step in range(1, 201)]


def test_the_rows_of_each_depth():
    x = jnp.arange(12)
    assert [rows.take(x).tolist() for rows in rows_of_depths("all", 2)] == [list(range(12))] * 2
    assert [rows.take(x).tolist() for rows in rows_of_depths("parts", 3)] == [
        [0, 3, 6, 9],
        [1, 4, 7, 10],
        [2, 5, 8, 11],
    ]
    assert [rows.take(x).tolist() for rows in rows_of_depths("every:6", 3)] == [
        [0, 6],
        [1, 7],
        list(range(12)),
    ]
    assert [rows.take(x).tolist() for rows in rows_of_depths("every:6", 1)] == [list(range(12))]


def test_the_first_step_on_the_full_grid(small):
    assert full_grid_from(Config.of(small)) is None
    small.train.update(depths=(1,), total_steps=400)
    assert full_grid_from(Config.of(small)) is None
    small.train.depths_until = 0.7
    assert full_grid_from(Config.of(small)) == 281
    assert [depths_of(Config.of(small), step) for step in (280, 281)] == [(1,), (2,)]


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_a_run_says_its_depths_and_learns_at_each(small, tmp_path, capsys):
    small.mesh.fsdp = 1
    small.train.update(depths=(1, 4), total_steps=12)
    small.optimizer.learning_rate = 1e-2
    assert train_to_end(Config.of(small), tmp_path) == 0
    assert "1 of 1, 4 solver step(s) in each optimizer step\n" in capsys.readouterr().err
    steps = [line for line in read_metrics(tmp_path) if "train/loss" in line]
    assert [(line["train/num_steps"],) for line in steps] == [
        depths_of(Config.of(small), line["step"]) for line in steps
    ]
    for num_steps in (1, 2, 4):  # 2 was never drawn
        run = load_run(tmp_path, 256, batch_size=1).at_depth(num_steps)
        tokens = jnp.asarray(np.frombuffer(b"line 4 of the te", np.uint8)[None], jnp.int32)
        logits = run.placed.model.apply({"params": run.params}, tokens)[0, :-1]
        losses = jax.nn.logsumexp(logits, -1) - logits[np.arange(15), tokens[0, 1:]]
        assert losses.mean() < np.log(256) - 0.3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train.depths": (2, 2), "train.depths_per_step": 2}, "from 1 to the 1 different"),
        ({"train.depths": (2, 4), "train.depths_rows": "parts"}, "depths_rows=parts needs several"),
        ({"train.depths_distill": 0.5}, "depths_distill=0.5 needs several depths"),
        (
            {**SEVERAL, "train.depths_distill": 0.5, "train.depths_rows": "parts"},
            "take all or every:k",
        ),
        (
            {**SEVERAL, "train.depths_distill": 0.5, "train.distill_from": "DIR"},
            "a depth has one teacher",
        ),
    ],
    ids=str,
)
def test_bad_depths(small, keys, message):
    small.update_from_flattened_dict(keys)
    with pytest.raises(InputError, match=message):
        run_checks("train", Config.of(small))


def test_rows_that_do_not_divide(small):
    small.train.update(depths=(2, 4), depths_per_step=2, depths_rows="every:3")
    with pytest.raises(InputError, match=r"batch_size=8 is not divisible by 3 \(train.depths_rows"):
        setup_of(small)
