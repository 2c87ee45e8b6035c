"""A run made from a Hugging Face folder, or a neural ODE that computes the same."""

from dataclasses import replace
from math import isfinite
from pathlib import Path

import jax
from absl.flags import FlagValues

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.stored import RunFacts
from t5x_diffeq.data.corpus import Corpus, load_corpus, prepare_corpus
from t5x_diffeq.data.examples import check_data, eval_examples
from t5x_diffeq.data.sources import check_paths
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.exchange.folder import check_new_folder, local_path, need_packages, new_folder
from t5x_diffeq.exchange.from_pretrained import (
    check_vocabulary,
    pretrained_params,
    read_config_json,
    with_model,
    with_tokenizer,
)
from t5x_diffeq.exchange.hub import fetch_model, is_hub_id
from t5x_diffeq.exchange.to_ode import ode_keys, to_ode
from t5x_diffeq.exchange.to_peft import ADAPTER_CONFIG
from t5x_diffeq.inference.split_loss import evaluate_split
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.runs.load import Run, load_run
from t5x_diffeq.runs.workdir import save_config
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.console import Progress, print_table, say
from t5x_diffeq.runtime.errors import InputError, RunError
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.training.setup import make_setup

_ROWS, _BATCHES = 8, 4  # rows per batch, and batches, on which the perplexity is measured


def load_folder(config: Config, folder: Path, flags: FlagValues) -> tuple[Config, Tokenizer, dict]:
    """The config with the folder's model, the tokenizer and the parameters.

    Raises:
      InputError: if the folder is invalid.
    """
    found = read_config_json(folder)
    config, tables = with_model(config, found, flags.sequence_length)
    config, tokenizer = with_tokenizer(config, found, folder)
    padding = check_vocabulary(tokenizer, tables)
    if padding:
        say(f"{padding} rows of the vocabulary that no token has are left out")
    model = ModelConfig.of(config.model, tokenizer.vocab_size, config.data.sequence_length)
    return config, tokenizer, pretrained_params(folder, found, model, tables)


def write_run(config: Config, tokenizer: Tokenizer, params: dict, workdir: Path) -> None:
    """Writes a complete workdir at step 0: config, data, tokenizer, checkpoint; all or nothing.

    Args:
      config: the run's config.
      tokenizer: the model's tokenizer.
      params: the model's parameters.
      workdir: the folder, new or empty.

    Raises:
      InputError: if the config, the data or the folder is invalid.
      RunError: if the workdir can't be written.
    """
    one_device = jax.devices()[:1]
    setup = make_setup(config, tokenizer.vocab_size, one_device)
    with new_folder(workdir, "workdir") as folder:
        corpus = prepare_corpus(config.data, folder, new=True)
        if corpus.tokenizer.fingerprint != tokenizer.fingerprint:
            raise InputError(
                f"data.path={config.data.path}: its shards were made with another tokenizer than "
                "the model's; prepare them again with --config.data.tokenizer"
            )
        tokenizer.save(folder / "tokenizer")  # with what its folder says besides
        eval_examples(config.data, corpus)  # raises if the text is too short to validate on
        with setup.context(), Checkpoints(folder, keep=1) as checkpoints:
            state = setup.init_state()
            places = jax.tree.map(lambda leaf: leaf.sharding, state.params)
            state = replace(state, params=jax.device_put(params, places))
            checkpoints.save(0, state, RunFacts(corpus.fingerprint))
        save_config(config, folder)


def perplexity(run: Run, corpus: Corpus, num_steps: int) -> str:
    """The perplexity on the first sequences of the validation split with N solver steps.

    Raises:
      RunError: if the loss isn't finite.
    """
    values = evaluate_split(run.at_depth(num_steps), corpus, _ROWS, limit=_BATCHES)
    if not isfinite(values["loss"]):
        raise RunError(
            f"the loss of the converted model with {num_steps} steps is {values['loss']}: its "
            "weights are too large for float32, or damaged; restore the folder"
        )
    return f"{values['perplexity']:.2f}"


def convert(config: Config, source: AnyPath, to: AnyPath, flags: FlagValues) -> None:
    """Makes the run, and prints its perplexity on a part of the validation text.

    Args:
      config: provides the data, train and optimizer sections.
      source: the Hugging Face folder; if it doesn't exist, its name is a model's on the Hub.
      to: the workdir, new or empty.
      flags: the verb's flags.

    Raises:
      InputError: if the folder is invalid, or the workdir can't be made.
    """
    folder, workdir = local_path(source, "input"), local_path(to, "workdir")
    need_packages("convert")
    check_new_folder(workdir, "workdir")
    check_data(config.data)
    check_paths(config.data)
    if not folder.exists() and is_hub_id(flags.input):
        folder = fetch_model(flags.input)
    if (folder / ADAPTER_CONFIG).exists():
        raise InputError(
            f"--input={folder} holds PEFT's adapters, not a model; merge them in PEFT "
            "(merge_and_unload), save the model and the tokenizer, and convert that folder"
        )
    with Progress(f"converting {folder}"):
        config, tokenizer, params = load_folder(config, folder, flags)
        if flags.to_ode:
            config = replace(config, model=ode_keys(config.model))
            length = config.data.sequence_length
            params = to_ode(ModelConfig.of(config.model, tokenizer.vocab_size, length), params)
        write_run(config, tokenizer, params, workdir)
    layers = config.model.num_steps
    others = [max(1, layers // 2), 2 * layers] if flags.to_ode else []
    own = "own grid, the folder's model" if flags.to_ode else "layers"
    corpus = load_corpus(workdir)
    run = load_run(workdir, corpus.tokenizer.vocab_size, batch_size=jax.device_count())
    found = {f"{layers} ({own})": perplexity(run, corpus, layers)}
    found |= {f"{steps} steps": perplexity(run, corpus, steps) for steps in others}
    say(f"converted to {workdir}")
    print_table(f"perplexity on up to {_ROWS * _BATCHES} sequences of the validation text", found)
