"""A complete workdir at step 0, made from given parameters instead of by training."""

from dataclasses import replace
from pathlib import Path

import jax

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.stored import RunFacts
from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.exchange.folder import new_folder
from t5x_diffeq.runs.workdir import save_config
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.training.setup import make_setup


def write_run(config: Config, tokenizer: Tokenizer, params: dict, workdir: Path) -> None:
    """Writes config, data, tokenizer and checkpoint: all of them or nothing.

    Args:
      config: the run's config.
      tokenizer: the model's tokenizer.
      params: the model's parameters.
      workdir: the folder, new or empty.

    Raises:
      InputError: if the config, the data or the folder can't be used.
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
        eval_examples(config.data, corpus)  # refuses a text that is too short to validate on
        with setup.context(), Checkpoints(folder, keep=1) as checkpoints:
            state = setup.init_state()
            _check_tree(params, state.params)
            places = jax.tree.map(lambda leaf: leaf.sharding, state.params)
            state = replace(state, params=jax.device_put(params, places))
            checkpoints.save(0, state, RunFacts(corpus.fingerprint))
        save_config(config, folder)


def _check_tree(params: dict, expected: dict) -> None:
    """Checks that the parameters have the paths and shapes of the model's."""
    shapes = [jax.tree.map(lambda x: x.shape, tree) for tree in (params, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"parameters {shapes[0]} are not the model's {shapes[1]}")
