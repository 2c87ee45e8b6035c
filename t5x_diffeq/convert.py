"""Makes a run of a Hugging Face Llama or GPT-2: --input=FOLDER --workdir=NEW [--to_ode].

The workdir is complete, at step 0: evaluate, generate, analyze, export and finetune take it. With
--to_ode the layers become the values of W(t) at the nodes of a neural ODE, which on that grid is
the same model. Text to measure on is --config.data.source and --config.data.path, as in training;
model, length and tokenizer are the folder's. Needs safetensors: pip install -e '.[export]'.
"""

from collections.abc import Iterable
from pathlib import Path

import jax
from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from t5x_diffeq import command_line
from t5x_diffeq.config_files import CONFIGS
from t5x_diffeq.config_keys import INT32
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.examples import check_data, eval_examples
from t5x_diffeq.data.pipeline import eval_batches
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.errors import InputError
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
from t5x_diffeq.report import say, table
from t5x_diffeq.training.evaluation import evaluate
from t5x_diffeq.training.run import load_run
from t5x_diffeq.training.step import make_eval_step

ROWS, BATCHES = 8, 4  # of the validation text on which the perplexity is measured
# Keys that the folder doesn't decide.
FREE = {"dtype", "state_dtype", "attention", "remat", "dropout_rate", "time_embedding"}

FLAGS = flags.FlagValues()
INPUT = flags.DEFINE_string(
    "input", None, "Hugging Face folder of a Llama or GPT-2, with safetensors.", flag_values=FLAGS
)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder to make; new, or empty.", flag_values=FLAGS)
TO_ODE = flags.DEFINE_bool(
    "to_ode", False, "Make it a neural ODE, the same on its own grid.", flag_values=FLAGS
)
TIME_EMBED_DIM = flags.DEFINE_integer(
    "time_embed_dim",
    None,
    "T of the ODE, the layers or more; the layers.",
    1,
    INT32,
    flag_values=FLAGS,
)
SEQUENCE_LENGTH = flags.DEFINE_integer(
    "sequence_length", None, "A shorter length than the folder's.", 1, INT32, flag_values=FLAGS
)
CONFIG = config_flags.DEFINE_config_file(
    "config",
    str(CONFIGS / "default.py"),
    "Config file whose data, train and optimizer sections are taken.",
    flag_values=FLAGS,
)


def check_overrides(keys: Iterable[str]) -> None:
    """None of the keys that were set is the folder's.

    Raises:
      InputError: naming one that is.
    """
    for key in keys:
        section, _, name = key.partition(".")
        if (section == "model" and name not in FREE) or key == "data.sequence_length":
            raise InputError(f"--config.{key} is set, and it is the folder's that --input names")


def load(config: ConfigDict, folder: Path) -> tuple[Tokenizer, dict]:
    """Sets the config to the folder's model; returns tokenizer and parameters.

    Raises:
      InputError: if the folder can't be used.
    """
    found = read_config_json(folder)
    tables = set_model(config, found, SEQUENCE_LENGTH.value)
    tokenizer = set_tokenizer(config, found, folder)
    padding = check_vocabulary(tokenizer, tables)
    if padding:
        say(f"{padding} rows of the vocabulary that no token has are left out")
    keys, length = config.model.to_dict(), config.data.sequence_length
    model = ModelConfig.of(keys, tokenizer.vocab_size, length)
    params = pretrained_params(folder, found, model, tables)
    if not TO_ODE.value:
        return tokenizer, params
    ode = ode_config(model, TIME_EMBED_DIM.value)
    params, basis = to_ode(ode, params)
    config.model.update({key: getattr(ode, key) for key in keys if key != "vocab_size"})
    say(
        f"time embedding: T = {ode.time_embed_dim} for {ode.num_steps} nodes, condition number "
        f"{basis.condition:.2f} at the nodes; of the ramps that it mixes, {basis.mixed:.3g}"
    )
    return tokenizer, params


def perplexity(workdir: Path, num_steps: int) -> float:
    """On the first sequences of the validation split, with so many steps."""
    corpus = load_corpus(workdir)
    vocab_size, devices = corpus.tokenizer.vocab_size, jax.device_count()
    run = load_run(workdir, vocab_size, batch_size=devices, num_steps=num_steps)
    parts = eval_examples(run.config.data, corpus)
    with run.setup.context():
        rows = run.setup.eval_rows(min(ROWS, sum(map(len, parts))))
        eval_step = make_eval_step(run.setup.model, run.setup.loss_chunk)
        batches = eval_batches(parts, rows, run.setup.rows, BATCHES)
        return evaluate(eval_step, run.params, batches)["perplexity"]


def main() -> None:
    """The verb."""
    folder = local(command_line.folder(INPUT, "convert"), "input")
    workdir = local(command_line.folder(WORKDIR, "convert"), "workdir")
    if TIME_EMBED_DIM.value is not None and not TO_ODE.value:
        raise InputError("--time_embed_dim is of a neural ODE; add --to_ode")
    check_overrides(config_flags.get_override_values(FLAGS["config"]))
    need_safetensors("convert")
    check_new(workdir, "workdir")
    config = CONFIG.value
    check_data(config.data)
    tokenizer, params = load(config, folder)
    write_run(config, tokenizer, params, workdir)
    layers = config.model.num_steps
    others = [max(1, layers // 2), 2 * layers] if TO_ODE.value else []
    own = "own grid, the folder's model" if TO_ODE.value else "layers"
    found = {f"{layers} ({own})": f"{perplexity(workdir, layers):.2f}"}
    found |= {f"{steps} steps": f"{perplexity(workdir, steps):.2f}" for steps in others}
    say(f"converted to {workdir}")
    table(f"perplexity on up to {ROWS * BATCHES} sequences of the validation text", found)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
