"""Converts a Hugging Face folder into a run: --input=FOLDER --workdir=NEW [--to_ode].

FOLDER holds a Llama, Mistral, Qwen2, Qwen3, OLMo 2, Gemma 1 or GPT-2 model, saved as safetensors;
docs/huggingface.md has a table of what is supported. A model's name on the Hub instead,
such as Qwen/Qwen3-0.6B, is fetched first (pip install 't5x_diffeq[data]'). The new workdir
is a complete run at step 0, for evaluate, generate, analyze, export and finetune. With --to_ode the
layers become the values of W(t) at the nodes of a neural ODE, which is the same model at that
number of steps. --config.data.source and --config.data.path name the text for its perplexity;
model, length and tokenizer come from FOLDER.
Needs safetensors: pip install 't5x_diffeq[export]'.
"""

from collections.abc import Iterable

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime import command_line
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.config_files import CONFIGS
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.keys.values import INT32

# Keys that the folder doesn't decide.
_FREE = {"dtype", "state_dtype", "products", "attention", "remat", "dropout_rate", "time_embedding"}

FLAGS = flags.FlagValues()
_INPUT = flags.DEFINE_string(
    "input",
    None,
    "Hugging Face folder with config.json, safetensors and a tokenizer; or a model's name on the "
    "Hub.",
    flag_values=FLAGS,
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder to write; it must be new or empty.", flag_values=FLAGS
)
_TO_ODE = flags.DEFINE_bool(
    "to_ode",
    False,
    "Convert to a neural ODE that is the same model at its own number of steps.",
    flag_values=FLAGS,
)
_SEQUENCE_LENGTH = flags.DEFINE_integer(
    "sequence_length",
    None,
    "Sequence length, if shorter than the model's.",
    1,
    INT32,
    flag_values=FLAGS,
)
CONFIG = config_flags.DEFINE_config_file(
    "config",
    str(CONFIGS / "default.py"),
    "Config file for the data, train and optimizer sections.",
    flag_values=FLAGS,
)


def check_overrides(keys: Iterable[str]) -> None:
    """Checks that no key is set that the folder determines.

    Raises:
      InputError: naming one that is.
    """
    for key in keys:
        section, _, name = key.partition(".")
        if (section == "model" and name not in _FREE) or key == "data.sequence_length":
            raise InputError(f"--config.{key} can't be set: it comes from --input; leave it out")


def main() -> None:
    """Runs the verb."""
    folder = command_line.parse_folder(_INPUT, "convert")
    workdir = command_line.parse_folder(_WORKDIR, "convert")
    overrides = config_flags.get_override_values(FLAGS["config"])
    check_overrides(overrides)

    from t5x_diffeq.verbs.convert import convert  # importing JAX takes seconds

    convert(Config.of(CONFIG.value), folder, workdir, FLAGS)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
