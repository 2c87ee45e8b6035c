"""A run made from a Hugging Face folder, or a neural ODE that computes or approximates the same."""

import shlex
from dataclasses import replace
from pathlib import Path

import jax
from absl.flags import FlagValues

from t5x_diffeq.data.corpus import Corpus, load_corpus
from t5x_diffeq.data.examples import check_data
from t5x_diffeq.data.sources import check_paths
from t5x_diffeq.data.tokenizer import Tokenizer, load_tokenizer
from t5x_diffeq.exchange.folder import check_new_folder, local_path, need_packages
from t5x_diffeq.exchange.from_peft import adapted_run, holds_adapters
from t5x_diffeq.exchange.from_pretrained import (
    check_vocabulary,
    pretrained_params,
    read_config_json,
    with_model,
    with_tokenizer,
)
from t5x_diffeq.exchange.hub import fetch_model, is_hub_id
from t5x_diffeq.exchange.new_run import write_run
from t5x_diffeq.exchange.to_ode import ode_keys, to_ode
from t5x_diffeq.inference.split_loss import evaluate_split
from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.runs.load import PretrainedRun, Run, load_run
from t5x_diffeq.runs.progress import python_command
from t5x_diffeq.runtime.config import KEYS, Config
from t5x_diffeq.runtime.console import Progress, print_table, say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.training.placed_model import place_model

_ROWS, _BATCHES = 8, 4  # rows per batch, and batches, on which the perplexity is measured


def load_folder(config: Config, folder: Path, flags: FlagValues) -> tuple[Config, Tokenizer, dict]:
    """The config with the folder's model, the tokenizer and the parameters.

    Raises:
      InputError: if the folder can't be used.
    """
    found = read_config_json(folder)
    config, tables = with_model(config, found, flags.sequence_length)
    config, tokenizer = with_tokenizer(config, found, folder)
    padding = check_vocabulary(tokenizer, tables)
    if padding:
        say(f"{padding} rows of the vocabulary that no token has are left out")
    return config, tokenizer, _folders_params(config, tokenizer.vocab_size, folder)


def _folders_params(config: Config, vocab_size: int, folder: Path) -> dict:
    """The parameters in the folder, for a config with its model."""
    found, length = read_config_json(folder), config.data.sequence_length
    _, tables = with_model(config, found, length)
    return pretrained_params(
        folder, found, ModelConfig.of(config.model, vocab_size, length), tables
    )


def _make_ode(config: Config, vocab_size: int, params: dict, width: int | None) -> tuple:
    """The config and the parameters of the ODE; and the errors by kind, none if it is exact."""
    keys = ode_keys(config.model, width)
    ode = ModelConfig.of(keys, vocab_size, config.data.sequence_length)
    params, errors = to_ode(ode, params)
    exact = ode.time_embed_dim >= ode.num_steps
    return replace(config, model=keys), params, {} if exact else errors


def perplexity(run: Run, corpus: Corpus, num_steps: int) -> str:
    """The perplexity on the first sequences of the validation split with N solver steps."""
    values = evaluate_split(run.at_depth(num_steps), corpus, _ROWS, limit=_BATCHES)
    return f"{values['perplexity']:.2f}"


def _original_perplexity(config: Config, run: Run, corpus: Corpus, folder: Path) -> str:
    """The perplexity of the folder's own model, read again, on the devices of `run`."""
    vocab_size = corpus.tokenizer.vocab_size
    theirs = replace(run.placed.config, model=config.model)
    placed = place_model(theirs, vocab_size, run.placed.mesh)
    shardings = jax.tree.map(lambda x: x.sharding, placed.abstract_params)
    params = jax.device_put(_folders_params(config, vocab_size, folder), shardings)
    return perplexity(Run(placed, params, 0), corpus, config.model.num_steps)


def convert(config: Config, source: AnyPath, to: AnyPath, flags: FlagValues) -> None:
    """Makes the run, and prints its perplexity on a part of the validation text.

    Args:
      config: provides the data, train and optimizer sections.
      source: the Hugging Face folder; if it doesn't exist, its name is a model's on the Hub.
      to: the workdir, new or empty.
      flags: the verb's flags.

    Raises:
      InputError: if the folder can't be used, or the workdir can't be made.
    """
    folder, workdir = local_path(source, "input"), local_path(to, "workdir")
    need_packages("convert")
    check_new_folder(workdir, "workdir")
    check_data(config.data)
    check_paths(config.data)
    if not folder.exists() and is_hub_id(flags.input):
        folder = fetch_model(flags.input)
    if holds_adapters(folder):
        raise InputError(
            f"--input={folder} holds PEFT's adapters; --base=RUN names the run whose export they "
            "were tuned on"
        )
    errors: dict[str, float] = {}
    with Progress(f"converting {folder}"):
        original, tokenizer, params = load_folder(config, folder, flags)
        config, sizes = original, [_count(params)]
        if flags.to_ode:
            config, params, errors = _make_ode(
                original, tokenizer.vocab_size, params, flags.time_embed_dim
            )
        sizes.append(_count(params))
        write_run(config, tokenizer, params, workdir)
    layers = config.model.num_steps
    others = [max(1, layers // 2), 2 * layers] if flags.to_ode and not errors else []
    own = "own grid, the folder's model" if flags.to_ode else "layers"
    corpus = load_corpus(workdir)
    run = load_run(workdir, corpus.tokenizer.vocab_size, batch_size=jax.device_count())
    own = f"T = {config.model.time_embed_dim}" if errors else own
    found = {f"{layers} ({own})": perplexity(run, corpus, layers)}
    found |= {f"{steps} steps": perplexity(run, corpus, steps) for steps in others}
    if errors:
        found = {"the folder's model": _original_perplexity(original, run, corpus, folder), **found}
    say(f"converted to {workdir}")
    if errors:
        say(f"parameters: {sizes[0]:,} in the folder, {sizes[1]:,} now")
        _print_errors(errors)
    print_table(f"perplexity on up to {_ROWS * _BATCHES} sequences of the validation text", found)
    if errors:
        _say_next(config, folder, workdir)


def convert_adapters(source: AnyPath, base: AnyPath, to: AnyPath) -> None:
    """Makes a run of the base with adapters that PEFT tuned on its export; prints its perplexity.

    Args:
      source: PEFT's folder.
      base: the workdir of the run that was exported.
      to: the workdir, new or empty.

    Raises:
      InputError: if the folder holds no adapters of the base's layers, or no workdir can be made.
    """
    folder, workdir = local_path(source, "input"), local_path(to, "workdir")
    need_packages("convert")
    check_new_folder(workdir, "workdir")
    tokenizer = load_tokenizer(base / "tokenizer")
    if tokenizer is None:
        raise InputError(f"--base={base} has lost its tokenizer/; restore it")
    with Progress(f"converting {folder}"):
        config, params = adapted_run(folder, PretrainedRun(base, tokenizer.vocab_size))
        write_run(config, tokenizer, params, workdir)
    corpus = load_corpus(workdir)
    run = load_run(workdir, tokenizer.vocab_size, batch_size=jax.device_count())
    layers = config.model.num_steps
    say(
        f"converted to {workdir}: {base} on {layers} steps, with adapters of rank "
        f"{config.model.adapter_rank}"
    )
    found = {"with the adapters": perplexity(run, corpus, layers)}
    print_table(f"perplexity on up to {_ROWS * _BATCHES} sequences of the validation text", found)


def _count(params: dict) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _print_errors(errors: dict[str, float]) -> None:
    """The relative error by kind of leaf, that of all kernels last."""
    kinds = sorted(errors.items(), key=lambda item: item[0] == "all kernels")
    rows = {kind: f"{error:.4f}" for kind, error in kinds}
    print_table("relative error in the Frobenius norm", rows)


def _say_next(config: Config, folder: Path, workdir: Path) -> None:
    """Prints the commands that distil the original into the approximation."""
    values = config.flat()
    changed = [
        f"--config.{name}={values[name]}"
        for name, key in KEYS.items()
        if name.startswith("data.") and key.finetune is True and values[name] != key.default
    ]
    teacher, tuned = f"{workdir}-teacher", f"{workdir}-distilled"
    commands = [
        ["convert", f"--input={folder}", f"--workdir={teacher}", *changed],
        [
            "finetune",
            "--config=configs/finetune.py:hypernetwork",
            f"--workdir={tuned}",
            f"--config.init_from={workdir}",
            f"--config.train.distill_from={teacher}",
            *changed,
        ],
        ["evaluate", f"--workdir={tuned}"],
    ]
    say(
        "next: make the folder's model a run too, train the approximation on its predictions, and "
        "evaluate:",
        *(f"  {python_command()} -m t5x_diffeq.{shlex.join(command)}" for command in commands),
    )
