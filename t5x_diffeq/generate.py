"""Continues prompts with a trained run: --workdir=DIR --prompt=TEXT [--prompt=TEXT ...].

Prints the prompt and what follows on standard output; of several, each as a JSON object.
"""

from absl import flags

from t5x_diffeq import command_line
from t5x_diffeq.config_keys import INT32, STEPS
from t5x_diffeq.errors import InputError

FLAGS = flags.FlagValues()
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=FLAGS)
PROMPT = flags.DEFINE_multi_string(
    "prompt",
    None,
    "Text to continue, once for each; the validation text's opening.",
    flag_values=FLAGS,
)
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 64, "At most so many tokens more.", 1, INT32, flag_values=FLAGS
)
STOP = flags.DEFINE_multi_string(
    "stop", [], "Text at which to end, once for each.", flag_values=FLAGS
)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.8, "0: always the likeliest token.", flag_values=FLAGS
)
TOP_K = flags.DEFINE_integer(
    "top_k", None, "Draw among so many likeliest tokens; all.", 1, INT32, flag_values=FLAGS
)
TOP_P = flags.DEFINE_float(
    "top_p", 1.0, "Draw among the likeliest that have this probability.", flag_values=FLAGS
)
NUM_STEPS = flags.DEFINE_integer(
    "num_steps", None, "Number of steps; the trained one.", 1, STEPS, flag_values=FLAGS
)
SEED = flags.DEFINE_integer("seed", 0, "Decides the draw.", 0, 2**32 - 1, flag_values=FLAGS)
CHECKPOINT = flags.DEFINE_integer(
    "checkpoint", None, "Step of the checkpoint; the newest.", 0, INT32, flag_values=FLAGS
)
ADAPTERS = flags.DEFINE_string(
    "adapters", None, "adapters/ that a finetune trained beside this run.", flag_values=FLAGS
)


def check_flags() -> None:
    """Flags are in their ranges.

    Raises:
      InputError: naming one that isn't.
    """
    if not 0 < TOP_P.value <= 1:
        raise InputError(f"--top_p={TOP_P.value} must be above 0, and at most 1")
    if TEMPERATURE.value != 0 and not 1e-3 <= TEMPERATURE.value <= 1e3:
        raise InputError(f"--temperature={TEMPERATURE.value} must be 0, or from 0.001 to 1000")


def main() -> None:
    """The verb."""
    check_flags()
    workdir = command_line.folder(WORKDIR, "generate")

    from t5x_diffeq.verbs.generate import continue_prompts  # JAX and the rest take seconds

    continue_prompts(workdir, FLAGS)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
