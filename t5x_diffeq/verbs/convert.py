"""A run made from a Hugging Face folder, or a neural ODE that computes the same."""

from pathlib import Path

import jax
from absl.flags import FlagValues
from ml_collections import ConfigDict

from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.examples import check_data
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.exchange.folder import check_new, local, need_safetensors
from t5x_diffeq.exchange.from_pretrained import (
    check_vocabulary,
    pretrained_params,
    read_config_json,
    set_model,
    set_tokenizer,
)
from t5x_diffeq.exchange.new_run import write_run
from t5x_diffeq.exchange.to_ode import ode_config, to_ode
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.runs.load import load_run
from t5x_diffeq.runtime.console import Progress, say, table
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.verbs.evaluate import evaluate_split

ROWS, BATCHES = 8, 4  # rows per batch, and batches, on which the perplexity is measured


def load(config: ConfigDict, folder: Path, flags: FlagValues) -> tuple[Tokenizer, dict]:
    """Sets the config to the folder's model; returns its tokenizer and parameters.

    Raises:
      InputError: if the folder can't be used.
    """
    found = read_config_json(folder)
    tables = set_model(config, found, flags.sequence_length)
    tokenizer = set_tokenizer(config, found, folder)
    padding = check_vocabulary(tokenizer, tables)
    if padding:
        say(f"{padding} rows of the vocabulary that no token has are left out")
    keys, length = config.model.to_dict(), config.data.sequence_length
    model = ModelConfig.of(keys, tokenizer.vocab_size, length)
    params = pretrained_params(folder, found, model, tables)
    if not flags.to_ode:
        return tokenizer, params
    ode = ode_config(model, flags.time_embed_dim)
    params, basis = to_ode(ode, params)
    config.model.update({key: getattr(ode, key) for key in keys if key != "vocab_size"})
    say(
        f"time embedding: T = {ode.time_embed_dim} for {ode.num_steps} nodes, condition number "
        f"{basis.condition:.2f} at the nodes; of the ramps that it mixes, {basis.mixed:.3g}"
    )
    return tokenizer, params


def perplexity(workdir: Path, num_steps: int) -> float:
    """The perplexity on the first sequences of the validation split with N solver steps."""
    corpus = load_corpus(workdir)
    vocab_size, devices = corpus.tokenizer.vocab_size, jax.device_count()
    run = load_run(workdir, vocab_size, batch_size=devices, num_steps=num_steps)
    return evaluate_split(run, corpus, ROWS, limit=BATCHES)["perplexity"]


def convert(config: ConfigDict, source: AnyPath, to: AnyPath, flags: FlagValues) -> None:
    """Makes the run, and prints its perplexity on a part of the validation text.

    Args:
      config: provides the data, train and optimizer sections.
      source: the Hugging Face folder.
      to: the workdir, new or empty.
      flags: the verb's flags.

    Raises:
      InputError: if the folder can't be used, or the workdir can't be made.
    """
    folder, workdir = local(source, "input"), local(to, "workdir")
    need_safetensors("convert")
    check_new(workdir, "workdir")
    check_data(config.data)
    with Progress(f"converting {folder}"):
        tokenizer, params = load(config, folder, flags)
        write_run(config, tokenizer, params, workdir)
    layers = config.model.num_steps
    others = [max(1, layers // 2), 2 * layers] if flags.to_ode else []
    own = "own grid, the folder's model" if flags.to_ode else "layers"
    found = {f"{layers} ({own})": f"{perplexity(workdir, layers):.2f}"}
    found |= {f"{steps} steps": f"{perplexity(workdir, steps):.2f}" for steps in others}
    say(f"converted to {workdir}")
    table(f"perplexity on up to {ROWS * BATCHES} sequences of the validation text", found)
