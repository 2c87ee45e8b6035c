"""A workdir that an earlier commit wrote is read, and its run goes on as it did there."""

import shutil

import numpy as np
import pytest
from helpers import SUPPORT

import t5x_diffeq as td
from t5x_diffeq.training.tracking.jsonl import read_metrics

# Commit f6b9ac4 trained it to step 6; the archive has the checkpoint of step 4.
CONFIG = {
    "data.source": "text_files",
    "data.path": "text.txt",
    "data.tokenizer": "bytes",
    "data.sequence_length": 16,
    "model.num_steps": 2,
    "model.embed_dim": 8,
    "model.num_heads": 2,
    "model.mlp_dim": 16,
    "model.time_embed_dim": 4,
    "model.num_frequencies": 2,
    "train.total_steps": 6,
    "train.batch_size": 8,
    "train.log_every": 1,
    "train.eval_every": 2,
    "train.eval_batches": 2,
    "train.eval_all_at_end": False,
    "train.checkpoint_every": 4,
}
LOSS_AT_4 = 5.441838141247234
LOSSES_AFTER = {5: 5.43678617477417, 6: 5.433680057525635}
NORMS_AFTER = {5: 0.8229447603225708, 6: 0.7356520295143127}


@pytest.mark.slow
def test_a_recorded_workdir(tmp_path, monkeypatch):
    shutil.unpack_archive(SUPPORT / "recorded" / "workdir.tar.xz", tmp_path)
    monkeypatch.chdir(tmp_path)
    workdir = tmp_path / "run"
    run = td.load(workdir)
    np.testing.assert_allclose(run.evaluate(eval_batches=2)["loss"], LOSS_AT_4, rtol=1e-5)
    assert run.generate("ab", max_tokens=3).startswith("ab")

    td.train(td.load_config("configs/tiny.py", CONFIG), workdir)
    lines = {line["step"]: line for line in read_metrics(workdir) if "train/loss" in line}
    assert sorted(lines) == [1, 2, 3, 4, 5, 6]
    for step in (5, 6):
        np.testing.assert_allclose(lines[step]["train/loss"], LOSSES_AFTER[step], rtol=1e-5)
        np.testing.assert_allclose(lines[step]["train/grad_norm"], NORMS_AFTER[step], rtol=1e-4)
