"""From a base model to one that answers: tuned on conversations, asked, and exported."""

import json
import math

import pytest
from helpers import call, small_config

from configs import finetune as finetune_config
from t5x_diffeq.cli import export, generate
from t5x_diffeq.cli.finetune import finetune
from t5x_diffeq.config.config import flatten
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.tracking.jsonl import read_metrics

# Short, because the base reads 16 bytes: `u1+1|a2|`.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'user' %}{{ m.content + '|' }}{% else %}"
    "{% generation %}{{ m.content + '|' }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
SUMS = [(f"{a}+{b}", str(a + b)) for a in range(9) for b in range(9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sums")
    records = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in SUMS
    ]
    (path / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "sums.jinja").write_text(TEMPLATE)
    return path


def tuning_config(base, folder):
    config, like = finetune_config.get_config("full"), small_config(folder / "sums.jsonl")
    config.init_from = str(base)
    config.data.update(
        source="text_files",
        path=str(folder / "sums.jsonl"),
        loss_on="completion",
        chat_template=str(folder / "sums.jinja"),
        packing="first_fit",
    )
    config.train.update({k: like.train[k] for k in ("batch_size", "eval_batch_size")})
    config.train.update(total_steps=160, log_every=80, eval_every=80, checkpoint_every=80)
    config.optimizer.learning_rate = 1e-2
    config.mesh.fsdp = 1
    return config


@pytest.mark.slow
@pytest.mark.in_turns("trainings")
def test_a_model_that_answers(finished, folder, tmp_path, capsys):
    config, workdir = tuning_config(finished[1], folder), tmp_path / "tuned"
    assert finetune(flatten(config), workdir) == 0
    told = capsys.readouterr().err
    assert f"generate --workdir={workdir} --trust_plugins --chat --prompt='...'" in told
    assert "with a loss)" in told and "tokens of the completions" in told
    curve = [line for line in read_metrics(workdir) if "eval/loss" in line]
    # Each answer counts with `|` and the end of its document, and nothing of the questions.
    answers = [a for _, a in SUMS]
    counted = curve[0]["eval/tokens"]
    assert counted in {sum(len(a) + 2 for a in answers[n:]) for n in range(len(answers))}
    assert all(math.isfinite(line["eval/loss"]) for line in curve)
    assert curve[-1]["eval/loss"] < curve[0]["eval/loss"] - 1
    assert load_tokenizer(workdir / "tokenizer").chat.template == TEMPLATE

    config.data.loss_on = "all"
    with pytest.raises(InputError, match=r"data.loss_on was 'completion', is 'all'"):
        finetune(flatten(config), workdir)

    call(generate, f"--workdir={workdir}", "--chat", "--prompt=1+1", "--temperature=0")
    answer = capsys.readouterr().out.strip()
    assert answer.isdigit() and len(answer) <= 2  # neither the question nor what ends the answer
    with pytest.raises(InputError, match=r"--chat needs a message to answer; give --prompt"):
        call(generate, f"--workdir={workdir}", "--chat")
    with pytest.raises(InputError, match=r"--chat: the run in .* has no chat template; tune it"):
        call(generate, f"--workdir={finished[1]}", "--chat", "--prompt=1+1")

    call(export, f"--workdir={workdir}", f"--output={tmp_path / 'exported'}")
    written = json.loads((tmp_path / "exported" / "tokenizer_config.json").read_text())
    assert written["chat_template"] == TEMPLATE
