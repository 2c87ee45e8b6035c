"""Continues prompts with a trained run: --workdir=DIR --prompt=TEXT [--prompt=TEXT ...].

Prints the prompt and its continuation on standard output, or a JSON object for each of several.
With --chat, a prompt is a message to the run's model, and only the answer is printed.
"""

from absl import flags

from t5x_diffeq.runtime import command_line, run_flags
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.extras import need_package
from t5x_diffeq.runtime.keys.values import INT32

FLAGS = flags.FlagValues()
_WORKDIR = run_flags.define_workdir(FLAGS)
_PROMPT = run_flags.define_prompts(FLAGS, "Text to continue")
_CHAT = flags.DEFINE_bool(
    "chat",
    False,
    "Write each prompt as a user's message, with the run's chat template; print the answer alone.",
    flag_values=FLAGS,
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 64, "Maximum number of new tokens.", 1, INT32, flag_values=FLAGS
)
_STOP = flags.DEFINE_multi_string(
    "stop", [], "Text at which to stop; may be repeated.", flag_values=FLAGS
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    0.8,
    "Sampling temperature; 0 always takes the likeliest token.",
    flag_values=FLAGS,
)
_TOP_K = flags.DEFINE_integer(
    "top_k",
    None,
    "Sample only from this many likeliest tokens. [default: all]",
    1,
    INT32,
    flag_values=FLAGS,
)
_TOP_P = flags.DEFINE_float(
    "top_p",
    1.0,
    "Sample only from the likeliest tokens that together have this probability.",
    flag_values=FLAGS,
)
run_flags.define_num_steps(FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Seed for sampling.", 0, 2**32 - 1, flag_values=FLAGS)
run_flags.define_checkpoint(FLAGS)
run_flags.define_averages(FLAGS)
run_flags.define_adapters(FLAGS)


def _check_flags() -> None:
    if _CHAT.value and not _PROMPT.value:
        raise InputError("--chat needs a message to answer; give --prompt=TEXT")
    if _CHAT.value:
        need_package("transformers", "--chat")
    if not 0 < _TOP_P.value <= 1:
        raise InputError(f"--top_p={_TOP_P.value} must be above 0, and at most 1")
    if _TEMPERATURE.value != 0 and not 1e-3 <= _TEMPERATURE.value <= 1e3:
        raise InputError(f"--temperature={_TEMPERATURE.value} must be 0, or from 0.001 to 1000")


def main() -> None:
    """Runs the verb."""
    _check_flags()
    workdir = command_line.parse_folder(_WORKDIR, "generate")

    from t5x_diffeq.verbs.generate import continue_prompts  # importing JAX takes seconds

    continue_prompts(workdir, FLAGS)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
