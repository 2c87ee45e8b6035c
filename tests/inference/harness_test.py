"""Tasks of the harness, offline: on a run, and while a model trains."""

import json
import os
import socket
import sys
from importlib.metadata import version

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import pytest
import warm_python
from compilation import flags_of_processes
from environments import make_environment
from helpers import LENGTH_OF_LINES, LINES, SUPPORT, call, run_to_end, setup_of, small_config
from process_runs import as_processes

from t5x_diffeq.cli import evaluate as evaluate_verb
from t5x_diffeq.cli import export as export_verb
from t5x_diffeq.cli.train import train_to_end
from t5x_diffeq.config.config import Config
from t5x_diffeq.model.sub_fields import need_methods
from t5x_diffeq.system.errors import InputError

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install -e '.[eval]'")

from t5x_diffeq.inference import harness

pytestmark = pytest.mark.in_turns


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a task of each output type."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [f"line {n} of the text" for n in range(5)]
    documents = [
        {"text": line, "wrong": line[::-1], "label": n % 2} for n, line in enumerate(lines)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    own = {
        "choice": (
            "multiple_choice",
            'doc_to_text: "{{text[:4]}}"\ndoc_to_choice: "{{[text[4:], wrong]}}"\n'
            "doc_to_target: label",
            ("acc", "acc_norm"),
        ),
        "cloze": (
            "loglikelihood",
            'doc_to_text: "{{text[:8]}}"\ndoc_to_target: "{{text[8:]}}"',
            ("perplexity", "acc"),
        ),
        "rolling": (
            "loglikelihood_rolling",
            'doc_to_text: ""\ndoc_to_target: text',
            ("word_perplexity", "bits_per_byte"),
        ),
        "generation": (
            "generate_until",
            'doc_to_text: "{{text[:6]}}"\ndoc_to_target: "{{text[6:]}}"\n'
            'generation_kwargs: {until: ["\\n"], max_gen_toks: 4}',
            ("exact_match",),
        ),
    }
    for name, (kind, fields, metrics) in own.items():
        (folder / f"{name}.yaml").write_text(
            f"task: local_{name}\ndataset_path: json\noutput_type: {kind}\n"
            f"dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}, "
            f"cache_dir: {folder}/cache}}\ntest_split: test\nfewshot_split: test\n{fields}\n"
            f"metric_list: [{', '.join(f'{{metric: {metric}}}' for metric in metrics)}]\n"
        )
    return folder


@pytest.fixture(scope="module")
def run_with_pieces(tmp_path_factory):
    """The workdir of a run whose tokenizer has a name for the end of text, as bytes have none."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text.txt").write_text(LINES)
    config = small_config(folder / "text.txt")
    config.data.update(
        tokenizer="sentencepiece", tokenizer_vocab_size=300, sequence_length=LENGTH_OF_LINES
    )
    config.optimizer.learning_rate = 0.01
    config.train.update(total_steps=20, checkpoint_every=20, eval_every=20)
    assert train_to_end(Config.of(config), folder / "run") == 0
    return folder / "run"


@pytest.mark.slow
def test_an_export_has_the_runs_numbers(run_with_pieces, tasks, tmp_path, capsys):
    """`lm_eval --model hf` and `evaluate --tasks`, with transformers and torch elsewhere."""
    versions = SUPPORT / "transformers_newest.txt"
    harness_of_ours = f"lm_eval[hf]=={version('lm_eval')}"
    python = make_environment(tmp_path / "v", "--requirements", str(versions), harness_of_ours)
    names = [f"local_{name}" for name in ("choice", "cloze", "rolling", "generation")]
    on_tasks = [f"--tasks={','.join(names)}", f"--include_path={tasks}", "--num_fewshot=1"]
    call(evaluate_verb, f"--workdir={run_with_pieces}", *on_tasks)
    ours = json.loads(capsys.readouterr().out)
    call(export_verb, f"--workdir={run_with_pieces}", f"--output={tmp_path / 'out'}")
    model = f"--model_args=pretrained={tmp_path / 'out'},trust_remote_code=True"
    command = [python, "-m", "lm_eval", "run", "--model=hf", model, *on_tasks, "--device=cpu"]
    ended = run_to_end(
        [*command, "--trust_remote_code", f"--output_path={tmp_path / 'results.json'}"]
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (file,) = tmp_path.glob("results*.json")
    theirs = json.loads(file.read_text())["results"]
    compared = [name for name in ours if name.startswith("tasks/") and "stderr" not in name]
    for name in compared:
        _, task, metric = name.split("/")
        assert theirs[task][f"{metric},none"] == pytest.approx(ours[name], rel=1e-4), name
    assert len(compared) == 7


@pytest.mark.slow
def test_the_harness_offline(run_on_lines, tasks, tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network is not needed")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    names = ["choice", "cloze", "rolling", "generation"]
    call(
        evaluate_verb,
        f"--workdir={run_on_lines}",
        f"--tasks={','.join(f'local_{name}' for name in names)}",
        f"--include_path={tasks}",
        f"--output={tmp_path}",
        "--num_fewshot=1",
        "--num_steps=2,3",
    )
    out = capsys.readouterr()
    at_two, at_three = map(json.loads, out.out.splitlines())
    assert (at_two["step"], at_two["num_steps"], at_three["num_steps"]) == (20, 2, 3)
    assert 0 <= at_two["tasks/local_choice/acc"] <= 1
    assert at_two["tasks/local_choice/acc_stderr"] > 0
    assert at_two["tasks/local_cloze/perplexity"] > 1
    assert at_two["tasks/local_rolling/bits_per_byte"] > 0
    assert at_two["tasks/local_generation/exact_match"] == 0
    assert at_two["tasks/local_cloze/perplexity"] != at_three["tasks/local_cloze/perplexity"]
    assert "\nlocal_choice" in out.err and "±" in out.err
    (file, _) = sorted(tmp_path.glob("*.json"))
    kept = json.loads(file.read_text())
    assert kept["results"]["local_choice"]["acc,none"] == at_two["tasks/local_choice/acc"]
    assert kept["n-shot"]["local_choice"] == 1
    documents = kept["documents"]
    assert documents.keys() == {"local_choice", "local_cloze"}  # those that have an accuracy
    assert len(documents["local_choice"]) == 5 and set(documents["local_choice"]) <= {0, 1}
    assert np.mean(documents["local_choice"]) == pytest.approx(at_two["tasks/local_choice/acc"])
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks=local_choise"], "there is no task 'local_choise'; did you mean local_choice"),
        (["--tasks=local_choice", "--scheme=tsit5"], "--tasks takes no adaptive scheme"),
        (["--num_fewshot=2"], "--include_path needs --tasks|--num_fewshot needs --tasks"),
    ],
)
def test_bad_arguments(run_on_lines, tasks, monkeypatch, arguments, message):
    own = harness.TaskManager(include_path=str(tasks), include_defaults=False)
    monkeypatch.setattr(harness, "manager_of", lambda *_: own)  # without the harness's thousands
    with pytest.raises(InputError, match=message):
        call(evaluate_verb, f"--workdir={run_on_lines}", f"--include_path={tasks}", *arguments)


def test_a_task_whose_data_is_gone(tasks, tmp_path):
    text = (tasks / "choice.yaml").read_text().replace("data.jsonl", "gone.jsonl")
    (tmp_path / "gone.yaml").write_text(text.replace("local_choice", "gone"))
    with pytest.raises(InputError, match="--tasks: gone can't be loaded"):
        harness.load_tasks(["gone"], None, str(tmp_path))
    with pytest.raises(InputError, match="is not a folder"):
        harness.load_tasks(["gone"], None, str(tmp_path / "none"))


def test_tasks_that_generate_need_a_block_that_can(tasks, small):
    folder = str(tasks)
    assert harness.load_tasks(["local_cloze"], None, folder).methods == ()
    methods = harness.load_tasks(["local_cloze", "local_generation"], None, folder).methods
    small.model.block = "examples.own_block:QKNormBlock"
    with pytest.raises(InputError, match="generation needs the method `extend`"):
        need_methods(setup_of(small).model.config, methods)


def test_the_papers_tasks_each_once():
    names = harness.task_names(["piqa", "paper", "other"])
    assert len(names) == 12 and names[0] == "piqa" and names[-1] == "other"


def test_without_the_harness(run_on_lines, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"--tasks needs the package lm_eval; .* -m pip install"):
        call(evaluate_verb, f"--workdir={run_on_lines}", "--tasks=piqa")


@pytest.mark.slow
def test_several_processes_answer_as_one(run_on_lines, tasks, tmp_path):
    """Two processes whose devices are interleaved on the mesh, as on a TPU pod."""
    names = ",".join(f"local_{name}" for name in ("choice", "cloze", "rolling", "generation"))
    environment = {**os.environ, "XLA_FLAGS": flags_of_processes(), "JAX_PLATFORMS": "cpu"}
    found = []
    ordered = [SUPPORT / "device_order.py", "interleaved"]
    for processes, devices, module in ((1, 1, ["-m"]), (2, 2, ordered)):
        verb = [
            warm_python.executable(),
            *(*module, "t5x_diffeq.evaluate", f"--workdir={run_on_lines}"),
            *(f"--tasks={names}", f"--include_path={tasks}", f"--output={tmp_path}"),
        ]
        ended = run_to_end(as_processes(processes, devices, verb), env=environment)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("\nlocal_choice") == 1  # only process 0 talks
        found.append(json.loads(ended.stdout))
    one, two = found
    assert one.keys() == two.keys() and len(one) > 8
    for key, value in one.items():
        if isinstance(value, str):
            assert two[key] == value
        else:
            np.testing.assert_allclose(two[key], value, rtol=1e-3, err_msg=key)
