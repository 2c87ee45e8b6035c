"""Fine-tuning: a run's model on a grid of its own, trained like any other model."""

import copy

from ml_collections import ConfigDict

from t5x_diffeq.data.corpus import check_tokenizers, load_corpus
from t5x_diffeq.data.recipe import adopt_tokenizer
from t5x_diffeq.data.tokenizer import load_tokenizer
from t5x_diffeq.runs.adapter_files import save_adapters
from t5x_diffeq.runs.pretrained import Pretrained, begin
from t5x_diffeq.runs.workdir import CONFIG_FILE, check_config, read_config
from t5x_diffeq.runtime.config_files import default_config
from t5x_diffeq.runtime.console import say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, place
from t5x_diffeq.runtime.processes import first_then_others
from t5x_diffeq.training.checkpoint import chosen_step, restore_params
from t5x_diffeq.training.setup import Setup, make_setup
from t5x_diffeq.training.state import TrainState
from t5x_diffeq.verbs.train import train

OF_ADAPTERS = ("adapter_rank", "adapter_alpha", "adapter_kernels")
OF_TUNING = ("num_steps", "scheme", "weights", "state_dtype", *OF_ADAPTERS)
OF_COMPUTING = ("dropout_rate", "dtype", "attention", "remat")  # the run's own unless changed
OF_TOKENIZER = ("tokenizer", "tokenizer_vocab_size", "end_of_text")


def complete(config: ConfigDict, pretrained: dict) -> ConfigDict:
    """The config with the model and the tokenizer of the pretrained run.

    Args:
      config: the config as given; None for a key of the grid means the pretrained run's value.
      pretrained: the pretrained run's config.

    Raises:
      InputError: if a key is set that the pretrained run determines, naming it.
    """
    config, untouched = copy.deepcopy(config), default_config()
    for key, own in pretrained["model"].items():
        given = config.model[key]
        if key in OF_TUNING and given is not None:
            continue
        if key not in OF_COMPUTING or given == untouched.model[key]:
            refuse_other(f"model.{key}", given, own, untouched.model[key])
            config.model[key] = own
    for key in OF_TOKENIZER:
        own = pretrained["data"][key]
        refuse_other(f"data.{key}", config.data[key], own, untouched.data[key])
        config.data[key] = own
    if config.data.sequence_length == untouched.data.sequence_length:
        config.data.sequence_length = pretrained["data"]["sequence_length"]
    return config


def refuse_other(key: str, given: object, own: object, untouched: object) -> None:
    """Checks that a key that the pretrained run determines is untouched or has the run's value.

    Raises:
      InputError: if it has another value.
    """
    if given is not None and given not in (own, untouched):
        raise InputError(
            f"{key}={given} can't be chosen: model and tokenizer come from init_from, where it is "
            f"{own}; leave it out (model.num_steps, model.scheme and adapters may differ)"
        )


def take_over(config: ConfigDict, workdir: AnyPath, first: bool) -> ConfigDict:
    """The completed config; for a new workdir it is checked, and the tokenizer is copied there.

    Raises:
      InputError: if the pretrained run can't be used, or not with this config.
    """
    if (workdir / CONFIG_FILE).exists():
        return complete(config, read_config(workdir))
    source = place(config.init_from, "config.init_from")
    config = complete(config, read_config(source))
    tokenizer = load_tokenizer(source / "tokenizer")
    if tokenizer is None:
        raise InputError(f"config.init_from={source} has lost its tokenizer/; choose another run")
    chosen_step(source, config.init_step)
    asked = make_setup(config, tokenizer.vocab_size).model.config
    Pretrained.of(source, tokenizer.vocab_size).check(asked)
    check_tokenizers(config.data, tokenizer)
    check_config(config, workdir)  # before the tokenizer of a run that lost its config is replaced
    if first:
        adopt_tokenizer(tokenizer, workdir / "tokenizer", config.data)
    return config


def keep_adapters(config: ConfigDict, workdir: AnyPath) -> None:
    """Writes what was trained, the adapters, to small files."""
    setup = make_setup(config, load_corpus(workdir).tokenizer.vocab_size)
    params, _ = restore_params(
        workdir, setup.abstract_state.params, verify=config.train.verify_checkpoints
    )
    trained = [name for name in params if setup.trains(name)]
    save_adapters(config, params, trained, workdir)


def finetune(config: ConfigDict, workdir: AnyPath) -> int:
    """Tunes to `config.train.total_steps`; returns the exit status, as `train` does.

    Raises:
      InputError: if the pretrained run can't be used, or not with this config.
      RunError: if the run fails.
    """
    if not config.init_from:
        raise InputError("config.init_from is not set; --config.init_from=DIR names a trained run")
    config = first_then_others(
        lambda first: take_over(config, workdir, first), "the tokenizer is taken over"
    )

    def begun(setup: Setup) -> TrainState:
        source = place(config.init_from, "config.init_from")
        vocab_size = setup.model.config.vocab_size
        state, step = begin(setup, config, Pretrained.of(source, vocab_size, config.init_step))
        say(f"begins with the weights of {source} at its step {step}")
        return state

    status = train(config, workdir, begun)
    if status == 0 and config.model.adapter_rank:
        keep_adapters(config, workdir)
    return status
