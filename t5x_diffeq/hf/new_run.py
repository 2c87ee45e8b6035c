"""A run made from another project's model: a complete workdir at step 0."""

from dataclasses import replace
from pathlib import Path

import jax

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.stored import RunFacts
from t5x_diffeq.checkpoints.workdir import save_config
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.corpus import prepare_corpus
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.hf.folder import new_folder
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.setup import make_setup


def write_run(config: Config, tokenizer: Tokenizer, params: dict, workdir: Path) -> None:
    """Writes a complete workdir at step 0: config, data, tokenizer, checkpoint; all or nothing.

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
        tokenizer.save(folder / "tokenizer")  # with the other settings of the folder it came from
        eval_examples(config.data, corpus)  # raises if the text is too short to validate on
        with setup.context(), Checkpoints(folder, keep=1) as checkpoints:
            state = setup.init_state()
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
            state = replace(state, params=jax.device_put(params, shardings))
            checkpoints.save(0, state, RunFacts(corpus.fingerprint))
        save_config(config, folder, checkpoints.run_id)
