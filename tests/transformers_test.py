"""Exported models in transformers and torch: a virtual environment of their own, installed here.

    launch/test.sh --slow tests/transformers_test.py

`PYTHON_WITH_TRANSFORMERS` names an interpreter that has them, and peft, already.
"""

import json
import os
import subprocess
import sys
from itertools import product

import pytest
from chats import TEMPLATES, TWO_TURNS, chat_tokenizer_of
from exported_models import ADAPTED, MODELS, TEXTS, random_run, record_outputs
from helpers import ROOT

from t5x_diffeq.data.chat_template import ChatTemplate
from t5x_diffeq.data.offsets import encode_with_offsets
from t5x_diffeq.exchange.save_pretrained import save_pretrained
from t5x_diffeq.exchange.tokenizer_files import write_tokenizer

PACKAGES = ("torch>=2.6", "transformers>=4.48", "jinja2", "peft>=0.14", "safetensors>=0.5", "numpy")
MINUTES = 10
UV = (sys.executable, "-m", "uv")


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory):
    """A Python that has torch, for the CPU where there is such a build, and transformers."""
    given = os.environ.get("PYTHON_WITH_TRANSFORMERS")
    if given:
        return given
    folder = tmp_path_factory.mktemp("transformers")
    python = folder / "venv" / "bin" / "python"
    # uv doesn't read pip's settings; a wheel found there is preferred to the registry's.
    links = os.environ.get("PIP_FIND_LINKS")
    environment = {**os.environ, **({"UV_FIND_LINKS": links} if links else {})}
    for command in (
        [*UV, "venv", "--quiet", "--python", sys.executable, folder / "venv"],
        [*UV, "pip", "install", "--quiet", "--python", python, *PACKAGES],
    ):
        try:
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=60 * MINUTES
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"torch and transformers took over {MINUTES} minutes to install")
        if ended.returncode != 0:
            pytest.skip(f"torch and transformers can't be installed: {ended.stderr[-300:]}")
    return python


@pytest.mark.slow
def test_exported_models_say_what_ours_say(interpreter, tmp_path):
    for name, model in (MODELS | ADAPTED).items():
        run, tokenizer, as_run = random_run(model)
        told = save_pretrained(
            run, as_run, tokenizer, [], tmp_path / "models" / name, peft=name in ADAPTED
        )
        said = record_outputs(run, tokenizer, TEXTS) | {"class": told.model_class}
        (tmp_path / "models" / f"{name}.json").write_text(json.dumps(said))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [interpreter, ROOT / "tests" / "in_transformers.py", tmp_path / "models"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert ended.stdout.count("agrees") == len(MODELS | ADAPTED)
    print(ended.stdout)


@pytest.mark.slow
def test_conversations_are_written_and_masked_as_in_transformers(interpreter, tmp_path):
    kinds = product(("bytes", "json", "prefixed"), TEMPLATES.items())
    for kind, (name, template) in kinds:
        if (kind, name) == ("bytes", "instruct"):
            continue  # bytes have no eos_token to write
        tokenizer = chat_tokenizer_of(kind, template)
        chat = ChatTemplate(tokenizer.chat, tokenizer.special_tokens)
        messages = TWO_TURNS if name != "instruct" else TWO_TURNS[1:]
        text, spans = chat.render_spans(messages, "assistant")
        (placed,) = encode_with_offsets(tokenizer, [text])
        said = {
            "messages": messages,
            "text": text,
            "prompt": chat.render(messages[:-1], prompting=True),
            "tokens": placed.tokens.tolist(),
            "mask": placed.overlap(spans, len(text)).astype(int).tolist(),
            "marked": name == "marked",
        }
        folder = tmp_path / f"{kind}_{name}"
        folder.mkdir()
        write_tokenizer(tokenizer, folder, max_length=100)
        (folder / "said.json").write_text(json.dumps(said))
    command = [interpreter, ROOT / "tests" / "in_transformers_chat.py", tmp_path]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert ended.stdout.count("agrees") == 3 * len(TEMPLATES) - 1
