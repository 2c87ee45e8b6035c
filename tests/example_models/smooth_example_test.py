"""The model that comes with a clone: this version reads it as the one that wrote it did."""

import shutil

import numpy as np
import pytest
from helpers import ROOT

import t5x_diffeq as td
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.branch import branch_off
from t5x_diffeq.training.run_status import RunStatus

WORKDIR = ROOT / "examples" / "smooth"
TEXT = "JULIET:\nGood night, good night! Parting is such sweet sorrow,\n"
LOSSES = {
    2: 1.765963,
    3: 1.201674,
    6: 1.135347,
    12: 1.154847,
}  # nats per byte, by the number of solver steps
CONTINUED = "That I will not so much a man and the pr"  # the likeliest bytes


def files():
    return {path: path.stat().st_mtime_ns for path in WORKDIR.rglob("*")}


@pytest.mark.slow
def test_the_model_of_the_clone():
    before = files()
    run = td.load(WORKDIR)
    for num_steps, loss in LOSSES.items():
        np.testing.assert_allclose(run.at_depth(num_steps).loss(TEXT), loss, rtol=1e-4)
    assert run.generate(TEXT, max_tokens=len(CONTINUED), temperature=0) == TEXT + CONTINUED
    with pytest.raises(InputError, match="not UTF-8"):
        run.tokens("\ud800")
    assert files() == before


def test_no_training_continues_it(tmp_path):
    """It has no optimizer's state; the error says what can be done with it."""
    copy, branch = tmp_path / "copy", tmp_path / "branch"
    shutil.copytree(WORKDIR, copy)
    config = read_config(copy)
    assert config.data.path == "tinyshakespeare.txt"  # a name, and no folder of some machine
    message = "checkpoint 4400 of .* has no optimizer's state.*: finetune --config.init_from="
    with pytest.raises(InputError, match=message):
        td.train(config, copy)
    with pytest.raises(InputError, match=message):
        branch_off(branch, copy, None, None, {"train.total_steps": 4500}, first=True)
    assert not branch.exists() and RunStatus(copy, 0.0).step == 4400
