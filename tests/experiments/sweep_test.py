"""A whole sweep by its command: stopped and continued, with a rate that diverges."""

import json
import os
import re
import signal
import subprocess
import time
from math import sqrt
from statistics import mean, median, stdev

import pytest
import warm_python
from compilation import flags_of_processes
from helpers import ROOT
from patience import patience, wait_for
from process_runs import write_text

STEPS = 300
KEYS = (
    *("--config.model.embed_dim=16", "--config.model.num_heads=2", "--config.model.mlp_dim=32"),
    *("--config.model.num_steps=2", "--config.model.time_embed_dim=4"),
    *("--config.model.num_frequencies=4", "--config.data.tokenizer=bytes"),
    *("--config.data.source=text_files", "--config.data.sequence_length=16"),
    *(f"--config.train.total_steps={STEPS}", "--config.train.batch_size=8"),
    *("--config.train.eval_batch_size=8", "--config.train.eval_batches=2"),
    *("--config.train.eval_every=100", "--config.train.log_every=1"),
)
RUNS = [f"learning_rate={rate}-seed={seed}" for seed in (0, 1) for rate in ("0.001", "1e+38")]


def start(folder, *more, **environment):
    words = ["--config=configs/tiny.py", f"--output={folder / 'out'}", *KEYS, *more]
    words += [
        f"--config.data.path={folder / 'text'}",
        "--grid",
        "optimizer.learning_rate=1e-3,1e38",
        "--seeds=2",
    ]
    return subprocess.Popen(
        [warm_python.executable(), "-m", "t5x_diffeq.sweep", *words],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags_of_processes(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a sweep that Ctrl-C stopped in its first run, and what it said at the end."""
    folder = tmp_path_factory.mktemp("sweep")
    write_text(folder).rename(folder / "text")
    first = start(folder)
    lines = folder / "out" / RUNS[0] / "metrics.jsonl"
    wait_for(lambda: first.poll() is not None or (lines.exists() and len(reports(lines)) > 3))
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=patience(120)) == 130, first.stderr.read()
    assert "stopped, saved; the same command continues" in first.stderr.read()
    assert 3 < len(reports(lines)) < STEPS
    assert not list((folder / "out").glob("results*"))
    second = start(folder)
    said, words = second.communicate(timeout=patience(600))
    assert second.returncode == 0, words
    return folder, said, words


def reports(path):
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [report for line in whole if "train/loss" in (report := json.loads(line))]


@pytest.mark.slow
@pytest.mark.in_turns("whole programs")
def test_the_run_that_was_stopped_continued(swept):
    folder, _, words = swept
    log = (folder / "out" / f"{RUNS[0]}.log").read_text()
    assert "stopped by Ctrl-C after step" in log
    steps = [each["step"] for each in reports(folder / "out" / RUNS[0] / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    assert re.search(rf"2 of 4: {re.escape(RUNS[1])}", words)
    assert words.count("diverged: at step 2 loss is nan") == 2


@pytest.mark.slow
def test_the_table_is_that_of_the_metrics(swept):
    folder, said, words = swept
    done = [RUNS[0], RUNS[2]]
    metrics = [
        [json.loads(line) for line in (folder / "out" / run / "metrics.jsonl").open()]
        for run in done
    ]
    evaluations = [[line for line in lines if "eval/loss" in line] for lines in metrics]
    rates = [
        median(line["train/tokens_per_second"] for line in lines if "train/loss" in line)
        for lines in metrics
    ]
    shown = {
        "loss": [each[-1]["eval/loss"] for each in evaluations],
        "lowest": [min(line["eval/loss"] for line in each) for each in evaluations],
        "bits": [each[-1]["eval/bits_per_byte"] for each in evaluations],
    }
    for values in shown.values():
        assert f"**{mean(values):.4f} ± {stdev(values) / sqrt(2):.4f}**" in said
    best, diverged = said.splitlines()[2:]
    assert best.startswith("| **0.001** |") and best.endswith("| 2 of 2 |")
    (speed,) = re.findall(r"\*\*([\d,]+) ± [\d,]+\*\*", best)
    assert float(speed.replace(",", "")) == pytest.approx(mean(rates), rel=0.1)
    assert diverged == "| 1e+38 |  |  |  |  | 0 of 2, 2 diverged |"
    assert "best: optimizer.learning_rate=0.001" in words
    assert (folder / "out" / "sweep.md").read_text() == said
    assert (folder / "out" / "sweep_over_steps.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_again_nothing_is_repeated_and_other_settings_are_refused(swept):
    folder, said, _ = swept
    results = (folder / "out" / "results.jsonl").read_bytes()
    began = time.time()
    # JAX would end at once if the sweep itself started devices, which its runs need.
    again = start(folder, JAX_PLATFORMS="none")
    out, words = again.communicate(timeout=patience(120))
    assert (again.returncode, out) == (0, said), words
    assert words.count(" is done\n") == 4
    assert (folder / "out" / "results.jsonl").read_bytes() == results
    newest = max(path.stat().st_mtime for path in (folder / "out").glob("*.log"))
    assert newest < began
    other = start(folder, "--config.optimizer.beta2=0.9")
    _, words = other.communicate(timeout=patience(120))
    assert other.returncode == 2
    assert words.startswith(f"error: --output: run {RUNS[0]} exists there with different settings")
    assert "settings: --config.optimizer.beta2=0.9;" in words
