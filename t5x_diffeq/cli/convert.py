"""Converts a Hugging Face folder into a run: --input=FOLDER --workdir=NEW [--to_ode].

FOLDER holds a Llama, Mistral, Qwen2, Qwen3, OLMo 2, Gemma 1 or GPT-2 model, saved as safetensors;
docs/huggingface.md has a table of what is supported. A model's name on the Hub instead,
such as Qwen/Qwen3-0.6B, is fetched first (pip install -e '.[data]'). The new workdir
is a complete run at step 0, for evaluate, generate, analyze, export and finetune. With --to_ode the
layers become the values of W(t) at the nodes of a neural ODE, which is the same model if its number
of steps is the number of layers. --config.data.source and --config.data.path name the text for its
perplexity; model, length and tokenizer come from FOLDER.
Needs safetensors: pip install -e '.[export]'.
"""

import re
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.config import Config
from t5x_diffeq.config.config_files import CONFIGS
from t5x_diffeq.config.keys.values import INT32
from t5x_diffeq.system.console import Progress, log, print_table
from t5x_diffeq.system.errors import InputError, RunError

if TYPE_CHECKING:
    from t5x_diffeq.data.tokenizer import Tokenizer

_ROWS, _BATCHES = 8, 4  # rows per batch, and batches, on which the perplexity is measured
# Keys that the folder doesn't decide.
_FREE = {"dtype", "state_dtype", "products", "attention", "remat", "dropout_rate", "time_embedding"}

FLAGS = VerbFlags(__name__)
_INPUT = FLAGS.define_text(
    "input",
    "Hugging Face folder with config.json, safetensors and a tokenizer; or a model's name on the "
    "Hub.",
)
_WORKDIR = FLAGS.define_text("workdir", "Folder to write; it must be new or empty.")
_TO_ODE = FLAGS.define_switch(
    "to_ode", "Convert to a neural ODE that is the same model at its own number of steps."
)
_SEQUENCE_LENGTH = FLAGS.define_integer(
    "sequence_length", "Sequence length, if shorter than the model's.", None, 1, INT32
)
CONFIG = FLAGS.define_config(
    "Config file for the data, train and optimizer sections.", str(CONFIGS / "default.py")
)


def main() -> None:
    """Runs the verb."""
    if hub := re.fullmatch(
        r"https?://(?:huggingface|hf)\.co/([^/]+(?:/[^/]+)?)/?", _INPUT.value or ""
    ):
        raise InputError(f"--input={_INPUT.value} is an address; give the name: --input={hub[1]}")
    source = flag_values.parse_folder(_INPUT, "convert")
    target = flag_values.parse_folder(_WORKDIR, "convert")
    for key in sorted(flag_values.given_keys(FLAGS)):
        section, _, name = key.partition(".")
        if (section == "model" and name not in _FREE) or key == "data.sequence_length":
            raise InputError(f"--config.{key} can't be set: it comes from --input; leave it out")

    import jax  # which takes seconds

    from t5x_diffeq.data.corpus import load_corpus
    from t5x_diffeq.hf.folder import (
        check_new_folder,
        fetch_model,
        is_hub_id,
        local_path,
        need_packages,
    )
    from t5x_diffeq.hf.new_run import write_run
    from t5x_diffeq.hf.to_ode import ode_keys, to_ode
    from t5x_diffeq.hf.to_peft import check_no_adapters
    from t5x_diffeq.model.config import ModelConfig
    from t5x_diffeq.training.checks import run_checks
    from t5x_diffeq.training.load import load_run

    config = Config.of(CONFIG.value)
    folder, workdir = local_path(source, "input"), local_path(target, "workdir")
    need_packages("convert")
    check_new_folder(workdir, "workdir")
    run_checks("convert", config)
    if not folder.exists() and is_hub_id(_INPUT.value):
        folder = fetch_model(_INPUT.value)
    check_no_adapters(folder)
    with Progress(f"converting {folder}"):
        config, tokenizer, params = load_folder(config, folder)
        if _TO_ODE.value:
            config = replace(config, model=ode_keys(config.model))
            length = config.data.sequence_length
            params = to_ode(ModelConfig.of(config.model, tokenizer.vocab_size, length), params)
        write_run(config, tokenizer, params, workdir)
    layers = config.model.num_steps
    others = [max(1, layers // 2), 2 * layers] if _TO_ODE.value else []
    trained_grid = "own grid, the folder's model" if _TO_ODE.value else "layers"
    corpus = load_corpus(workdir)
    run = load_run(workdir, corpus.tokenizer.vocab_size, batch_size=jax.device_count())
    perplexities = {f"{layers} ({trained_grid})": _perplexity(run, corpus, layers)}
    perplexities |= {f"{steps} steps": _perplexity(run, corpus, steps) for steps in others}
    log(f"converted to {workdir}")
    print_table(
        f"perplexity on up to {_ROWS * _BATCHES} sequences of the validation text", perplexities
    )


def load_folder(config: Config, folder: Path) -> "tuple[Config, Tokenizer, dict]":
    """The config with the folder's model, the tokenizer and the parameters."""
    from t5x_diffeq.hf import from_pretrained
    from t5x_diffeq.model.config import ModelConfig

    config_json = from_pretrained.read_config_json(folder)
    config, tables = from_pretrained.with_model(config, config_json, _SEQUENCE_LENGTH.value)
    config, tokenizer = from_pretrained.with_tokenizer(config, config_json, folder)
    if unused_rows := from_pretrained.check_vocabulary(tokenizer, tables):
        config = config.with_values({"model.embedding_rows": tables.tokens})
        log(f"{unused_rows} rows of the vocabulary that no token has are kept, never predicted")
    model = ModelConfig.of(config.model, tokenizer.vocab_size, config.data.sequence_length)
    return config, tokenizer, from_pretrained.pretrained_params(folder, config_json, model, tables)


def _perplexity(run, corpus, num_steps: int) -> str:
    """The perplexity on the first sequences of the validation split with N solver steps."""
    from t5x_diffeq.inference.validation import evaluate_split

    values = evaluate_split(run.at_depth(num_steps), corpus, _ROWS, limit=_BATCHES)
    if not isfinite(values["loss"]):
        raise RunError(
            f"the loss of the converted model with {num_steps} steps is {values['loss']}: its "
            "weights are too large for float32, or damaged; restore the folder"
        )
    return f"{values['perplexity']:.2f}"
