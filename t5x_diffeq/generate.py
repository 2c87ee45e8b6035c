"""Continues a prompt with a trained run: --workdir=DIR --prompt=TEXT.

Prints the prompt and what follows on standard output.
"""

import jax
from absl import flags

from t5x_diffeq import command_line
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.errors import InputError
from t5x_diffeq.models.sampling import generate
from t5x_diffeq.report import say
from t5x_diffeq.training.run import load_run

OPENING = 16  # tokens of the validation text that are the prompt if none is given

FLAGS = flags.FlagValues()
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=FLAGS)
PROMPT = flags.DEFINE_string(
    "prompt", None, "Text to continue; the validation text's opening.", flag_values=FLAGS
)
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 64, "At most so many tokens more.", flag_values=FLAGS
)
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.8, "0: always the likeliest token.", flag_values=FLAGS
)
TOP_K = flags.DEFINE_integer(
    "top_k", None, "Draw among so many likeliest tokens; all.", flag_values=FLAGS
)
NUM_STEPS = flags.DEFINE_integer(
    "num_steps", None, "Number of steps; the trained one.", flag_values=FLAGS
)
SEED = flags.DEFINE_integer("seed", 0, "Decides the draw.", flag_values=FLAGS)
CHECKPOINT = flags.DEFINE_integer(
    "checkpoint", None, "Step of the checkpoint; the newest.", flag_values=FLAGS
)


def check_flags() -> None:
    """Flags are in their ranges.

    Raises:
      InputError: naming one that isn't.
    """
    if PROMPT.value == "":
        raise InputError("--prompt is empty; give at least one character")
    for flag in (MAX_TOKENS, TOP_K):
        if flag.value is not None and flag.value < 1:
            raise InputError(f"--{flag.name}={flag.value} must be at least 1")
    if TEMPERATURE.value != 0 and not 1e-3 <= TEMPERATURE.value <= 1e3:
        raise InputError(f"--temperature={TEMPERATURE.value} must be 0, or from 0.001 to 1000")
    if not 0 <= SEED.value < 2**32:
        raise InputError(f"--seed={SEED.value} must be in [0, 2^32)")


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
    )
    model = run.setup.model
    opening = corpus.parts[0].validation[0][: min(OPENING, model.config.max_length // 2)]
    text = tokenizer.decode(opening) if PROMPT.value is None else PROMPT.value
    prompt = encode_prompt(tokenizer, text, model.config.max_length)
    room = model.config.max_length - len(prompt)
    if MAX_TOKENS.value > room:
        say(f"--max_tokens={MAX_TOKENS.value} is more than fits: {room} follow the prompt")
    tokens = []
    with run.setup.context():
        for token in generate(
            model,
            run.params,
            prompt,
            min(MAX_TOKENS.value, room),
            temperature=TEMPERATURE.value,
            top_k=TOP_K.value,
            key=jax.random.key(SEED.value),
        ):
            if token == tokenizer.end_of_text:
                break
            tokens.append(token)
    print(tokenizer.decode(prompt + tokens), flush=True)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
