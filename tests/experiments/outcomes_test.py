"""What is shown of outcomes: tables, paired tests, losses over steps, what can't be compared."""

import json

import numpy as np
import pytest

from studies.paired import compare_pairs, paired_table
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.config_files import default_config
from t5x_diffeq.data.tokenizer import ByteTokenizer
from t5x_diffeq.experiments.drawing import draw, loss_panels
from t5x_diffeq.experiments.present import TableSpec, add_task_scores, cells, format_markdown
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.experiments.tokenizers import TOKENS, is_papers, remark
from t5x_diffeq.system.errors import InputError


def test_a_table_of_means_at_their_best():
    outcomes = [
        {"model": model, "text": "t", "rate": rate, "seed": seed, "loss": loss + seed / 100}
        for model, rate, loss in (
            ("a", 1, 3.0),
            ("a", 2, 1.0),
            ("a", 4, 2.0),
            ("b", 1, 5.0),
            ("b", 2, 6),
        )
        for seed in (0, 2)
    ]
    layout = TableSpec(row=("model",), column="text", value="loss", best_of="rate")
    found = cells([*outcomes, {"other": 1}], layout)
    a, b = found["a",]["t"], found["b",]["t"]
    assert (a.at, b.at) == (2, 1)
    table = format_markdown(outcomes, layout).splitlines()
    assert table[2] == "| a | 1.0100 ± 0.0100 (2) |"
    assert table[3] == "| b | 5.0100 ± 0.0100 (1) |"


def test_of_a_sweep_the_best_is_what_several_seeds_had():
    tried = ((1, 3.0, (0,)), (2, 2.0, (0, 1)), (4, 1.9, (0,)), (8, 5.0, (0,)))
    outcomes = [
        {"model": "a", "text": "t", "rate": rate, "seed": seed, "loss": loss + seed}
        for rate, loss, seeds in tried
        for seed in seeds
    ]
    cell = cells(outcomes, TableSpec(("model",), "text", "loss", best_of="rate"))["a",]["t"]
    assert (cell.at, cell.values) == (2, (2.0, 3.0))


def test_a_table_counts_the_seeds_that_diverged(tmp_path):
    """At the best rate only, and on each task that others are asked; a figure leaves them out."""
    tried = (("a", 1, 2.0), ("a", 1, 2.1), ("a", 1, None), ("a", 2, None), ("b", 1, None))
    outcomes = [
        {"model": model, "text": "t", "rate": rate, "seed": seed}
        | ({"diverged": "loss is nan"} if loss is None else {"loss": loss, "tasks/x/acc": 0.5})
        for seed, (model, rate, loss) in enumerate(tried)
    ]
    best = TableSpec(("model",), "text", "loss", best_of="rate")
    assert format_markdown(outcomes, best).splitlines()[2:] == [
        "| a | 2.0500 ± 0.0500 (1), 1 diverged |",
        "| b | 1 diverged |",
    ]
    scores = TableSpec(("task",), "model", "score")
    table = format_markdown(add_task_scores(outcomes), scores).splitlines()
    assert table[2] == "| x | 0.5000 ± 0.0000, 2 diverged | 1 diverged |"
    draw(outcomes, best, tmp_path / "figure1", tmp_path)
    assert (tmp_path / "figure1.png").exists()


def test_a_row_can_take_the_seeds_of_all_its_columns():
    outcomes = [
        {"text": "t", "rate": rate, "seed": seed, "loss": 1.0 + seed}
        for rate, seeds in ((1, (0,)), (2, (0, 1)))
        for seed in seeds
    ]
    diverged = [{"text": "t", "rate": r, "seed": s, "diverged": ""} for r, s in ((2, 2), (4, 0))]
    found = cells([*outcomes, *diverged], TableSpec(("text",), "rate", "loss", same_seeds=True))
    assert [str(cell) for cell in found["t",].values()] == ["1", "1", "1 diverged"]


def test_tasks_become_rows():
    outcomes = [
        {"model": model, "tasks/a/acc": score, "tasks/b/acc": 1, "tasks/b/perplexity": 9}
        for model, score in (("x", 0.25), ("y", 0.5))
    ]
    table = format_markdown(
        add_task_scores(outcomes), TableSpec(("task",), "model", "score")
    ).splitlines()
    assert table[2:] == ["| a | 0.25 | 0.5 |", "| b | 1 | 1 |"]


def test_scores_have_the_standard_errors_of_the_harness():
    outcome = {"model": "x", "tasks/mmlu/acc": 0.5, "tasks/mmlu_law/acc": 0.1}
    one = {**outcome, "seed": 0, "tasks/mmlu/acc_stderr": 0.02}
    layout = TableSpec(("task",), "model", "score")
    assert format_markdown(add_task_scores([one]), layout).splitlines()[2:] == [
        "| mmlu | 0.5 (0.0200) |"
    ]
    two = {**one, "seed": 1, "tasks/mmlu/acc": 0.6, "tasks/mmlu/acc_stderr": 0.04}
    assert format_markdown(add_task_scores([one, two]), layout).splitlines()[2:] == [
        "| mmlu | 0.5500 ± 0.0500 (0.0300) |"
    ]


def test_a_paired_test_sees_what_two_standard_errors_do_not():
    """Of 1000 hard and easy questions one model knows 30 more, and loses none."""
    b = np.repeat([[0.0, 1.0]], 500, axis=1)
    a = b.copy()
    a[0, :30] = 1
    test = compare_pairs(a, b)
    assert test.difference == pytest.approx(0.03)
    assert test.error == pytest.approx(np.std(a - b, ddof=1) / np.sqrt(1000))
    separate = np.sqrt((np.var(a, ddof=1) + np.var(b, ddof=1)) / 1000)
    assert test.difference < 2 * separate and test.p < 1e-6
    assert compare_pairs(b, b).p == 1


def test_a_paired_test_has_the_variance_of_seeds():
    """Seeds that differ by 0.1 from their mean say nothing of a difference of 0.05."""
    rng = np.random.default_rng(0)
    b = (rng.random((2, 5000)) < 0.5).astype(float)
    a = b + np.array([[0.15], [-0.05]])
    test = compare_pairs(a, b)
    assert test.error == pytest.approx(np.std([0.15, -0.05], ddof=1) / np.sqrt(2), rel=1e-6)
    assert test.p > 0.3


def test_tasks_are_tested_by_document(tmp_path):
    outcomes = []
    for model, right in (("baseline", [0, 1, 0, 1]), ("ode", [1, 1, 0, 1])):
        folder = tmp_path / model
        folder.mkdir()
        documents = {"mmlu_a": right[:2], "mmlu_b": right[2:], "piqa": right}
        (folder / "9-2-euler-20260101T000000.json").write_text('{"documents": {}}')
        (folder / "10-2-euler-20260102T000000.json").write_text(
            json.dumps({"documents": documents})
        )
        outcomes.append({"run": model, "text": "t", "shots": 0, "model": model, "seed": 0})
    (note,) = paired_table(outcomes, tmp_path)
    rows = note.splitlines()[-2:]
    assert rows[0].startswith("| t, mmlu, 0 | +0.2500 | 0.2500 | 0.32 | 1 | 4 |")
    assert rows[1].startswith("| t, piqa, 0 | +0.2500")
    for damage in ("[]", "{", '{"documents": []}', '{"documents": {"piqa": 1}}'):
        (tmp_path / "ode" / "10-2-euler-20260102T000000.json").write_text(damage)
        with pytest.raises(InputError, match=r"20260102T000000\.json is damaged: .*; delete it"):
            paired_table(outcomes, tmp_path)


def test_losses_over_steps_are_means_of_seeds(tmp_path):
    outcomes = []
    for seed, last in ((0, 2.0), (1, 3.0)):
        (tmp_path / f"r{seed}").mkdir()
        evaluations = [{"step": 0, "eval/loss": 5.0}, {"step": 7, "train/loss": 1.0}]
        lines = [*evaluations, {"step": 10, "eval/loss": last}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"r{seed}" / "metrics.jsonl").write_text(text)
        outcomes.append({"run": f"r{seed}", "text": "t", "model": "ode", "loss": last})
    layout = TableSpec(("text",), "model", "loss", over_steps=True)
    assert loss_panels(outcomes, layout, tmp_path) == {
        "t": {"ode": [(0, 5.0, 0.0), (10, 2.5, 0.5)]}
    }
    draw(outcomes, layout, tmp_path / "figure1", tmp_path)
    for name in ("figure1.png", "figure1_over_steps.png", "figure1_over_steps.pdf"):
        assert (tmp_path / name).stat().st_size > 1000


class Gpt2LikeTokenizer(ByteTokenizer):
    """A tokenizer that makes GPT-2's tokens of what is asked for."""

    def encode(self, texts):
        return [np.array(TOKENS["gpt"]) for _ in texts]


def test_runs_of_other_tokenizers_can_not_be_compared(tmp_path):
    assert is_papers(Gpt2LikeTokenizer(), "gpt") and not is_papers(Gpt2LikeTokenizer(), "llama")
    assert not is_papers(ByteTokenizer(), "gpt") and not is_papers(None, "gpt")
    run = ExperimentRun("r", "train", ())
    (tmp_path / "r" / "tokenizer").mkdir(parents=True)
    ByteTokenizer().save(tmp_path / "r" / "tokenizer")
    (tmp_path / "r" / "config.json").write_text(json.dumps(Config.of(default_config()).as_json()))
    (said,) = remark([run, ExperimentRun("other", "evaluate", ())], tmp_path)
    assert "Not comparable with the paper's numbers" in said and said.endswith("Llama 2's): r.")
