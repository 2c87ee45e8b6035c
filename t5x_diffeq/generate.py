"""Continues prompts with a trained run: --workdir=DIR --prompt=TEXT [--prompt=TEXT ...].

Prints the prompt and what follows on standard output; of several, each as a JSON object.
"""

import json
import time

import jax
from absl import flags

from t5x_diffeq import command_line
from t5x_diffeq.config_keys import INT32, STEPS
from t5x_diffeq.continuation import Continuation
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.errors import InputError
from t5x_diffeq.files import place
from t5x_diffeq.models.sampling import Sampling, generate
from t5x_diffeq.report import say
from t5x_diffeq.training.run import Run, load_run

OPENING = 16  # tokens of the validation text that are the prompt if none is given

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


def encode_prompt(tokenizer: Tokenizer, text: str, max_length: int) -> list[int]:
    """The prompt's tokens.

    Raises:
      InputError: if they leave no room in the model's length.
    """
    try:
        (tokens,) = tokenizer.encode([text])
    except UnicodeEncodeError as error:
        raise InputError(f"--prompt={text!r} is not UTF-8 text") from error
    if len(tokens) >= max_length:
        raise InputError(
            f"--prompt has {len(tokens)} tokens, and the model's length is {max_length}; "
            "shorten the prompt"
        )
    return tokens.tolist()


def continue_rows(rows: list[Continuation], run: Run, max_tokens: int) -> None:
    """Adds tokens to the rows until all have ended; tells the rates, compilation left out."""
    sampling = Sampling(TEMPERATURE.value, TOP_K.value, TOP_P.value)
    prompts, key = [row.prompt for row in rows], jax.random.key(SEED.value)
    times = [time.perf_counter()]
    for tokens in generate(run.setup.model, run.params, prompts, max_tokens, sampling, key):
        times.append(time.perf_counter())
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.add(token)
        if all(row.ended for row in rows):
            break
    if len(times) > 4:  # the first compiles the prompts' program, the second the step's
        rate = len(rows) * (len(times) - 3) / (times[-1] - times[2])
        say(
            f"prompts read in {times[1] - times[0]:.1f} s, compilation included; "
            f"then {rate:.1f} tokens/s"
        )


def main() -> None:
    """The verb."""
    check_flags()
    workdir = command_line.folder(WORKDIR, "generate")
    corpus = load_corpus(workdir)
    tokenizer = corpus.tokenizer
    run = load_run(
        workdir,
        tokenizer.vocab_size,
        batch_size=1,
        num_steps=NUM_STEPS.value,
        checkpoint=CHECKPOINT.value,
        adapters=place(ADAPTERS.value, "--adapters") if ADAPTERS.value else None,
    )
    limit = run.setup.model.config.max_length
    opening = corpus.parts[0].validation[0][: min(OPENING, limit // 2)]
    texts = PROMPT.value or [tokenizer.decode(opening)]
    rows = [
        Continuation(tokenizer, encode_prompt(tokenizer, text, limit), STOP.value) for text in texts
    ]
    room = limit - max(len(row.prompt) for row in rows)
    if MAX_TOKENS.value > room:
        say(f"--max_tokens={MAX_TOKENS.value} is more than fits: {room} follow the prompt")
    with run.setup.context():
        continue_rows(rows, run, min(MAX_TOKENS.value, room))
    for row in rows:
        print(row.text() if len(rows) == 1 else json.dumps({"text": row.text()}), flush=True)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
