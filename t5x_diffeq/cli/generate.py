"""Continues prompts with a trained run: --workdir=DIR --prompt=TEXT [--prompt=TEXT ...].

Prints the prompt and its continuation on standard output, or a JSON object for each of several.
With --chat, a prompt is a message to the run's model, and only the answer is printed.
"""

import json
import time
from datetime import datetime

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.config.keys.values import INT32, TEMPERATURES
from t5x_diffeq.system.console import log, print_result, track
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package

_OPENING = 16  # tokens of the validation text that form the prompt if none is given
FLAGS = VerbFlags(__name__)
_WORKDIR = FLAGS.define_workdir()
_PROMPT = FLAGS.define_prompts("Text to continue")
_CHAT = FLAGS.define_switch(
    "chat",
    "Write each prompt as a user's message, with the run's chat template; print the answer alone.",
)
_MAX_TOKENS = FLAGS.define_integer("max_tokens", "Maximum number of new tokens.", 64, 1, INT32)
_STOP = FLAGS.define_texts("stop", "Text at which to stop; may be repeated.")
_TEMPERATURE = FLAGS.define_number(
    "temperature", "Sampling temperature; 0 always takes the likeliest token.", 0.8
)
_TOP_K = FLAGS.define_integer(
    "top_k", "Sample only from this many likeliest tokens. [default: all]", None, 1, INT32
)
_TOP_P = FLAGS.define_number(
    "top_p", "Sample only from the likeliest tokens that together have this probability.", 1.0
)
_NUM_STEPS = FLAGS.define_num_steps()
_SEED = FLAGS.define_integer(
    "seed",
    "Seed of the draws; with the same seed, the same command draws the same text.",
    0,
    0,
    2**32 - 1,
)
_CHECKPOINT = FLAGS.define_checkpoint()
_AVERAGES = FLAGS.define_averages()


def main() -> None:
    """Runs the verb."""
    _check_flags()
    workdir = flag_values.parse_folder(_WORKDIR, "generate")

    from t5x_diffeq.data.corpus import load_corpus  # importing JAX takes seconds
    from t5x_diffeq.inference.sampling import Continuation
    from t5x_diffeq.training.load import load_run

    corpus = load_corpus(workdir)
    tokenizer = corpus.tokenizer
    run = load_run(
        workdir,
        tokenizer.vocab_size,
        batch_size=1,
        checkpoint=_CHECKPOINT.value,
        averages=_AVERAGES.value,
        grids=[(_NUM_STEPS.value, None)],
        methods=("extend", "empty_cache"),
    ).at_depth(_NUM_STEPS.value)
    limit = run.placed.model.config.max_length
    texts = _PROMPT.value or [corpus.opening(min(_OPENING, limit // 2))]
    chat = _chat_of(tokenizer, run) if _CHAT.value else None
    for text in _STOP.value:
        if "\\n" in text:
            log(f"note: --stop={text} is a backslash and an n; a newline is --stop=$'\\n'")
    stops = [*_STOP.value, *([end] if chat and (end := chat.end_of_answer()) else [])]
    rows = [
        Continuation(tokenizer, _read_prompt(tokenizer, text, limit - 1, chat), stops)
        for text in texts
    ]
    room = limit - max(len(row.prompt) for row in rows)
    if _MAX_TOKENS.value > room:
        log(f"--max_tokens={_MAX_TOKENS.value} is too large: {room} fit after the prompt")
    with run.placed.context():
        _continue_rows(rows, run, min(_MAX_TOKENS.value, room))
    for row in rows:
        text = row.completion() if chat else row.text()
        print_result(text if len(rows) == 1 else json.dumps({"text": text}))


def _check_flags() -> None:
    if _CHAT.value and not _PROMPT.value:
        raise InputError("--chat needs a message to answer; give --prompt=TEXT")
    if _CHAT.value:
        need_package("transformers", "--chat")
    if not 0 < _TOP_P.value <= 1:
        raise InputError(f"--top_p={_TOP_P.value} must be above 0, and at most 1")
    for flag in (_TOP_K, _TOP_P):
        if flag.present and _TEMPERATURE.value == 0:
            log(f"note: --{flag.name} does nothing with --temperature=0; leave it out")
    lowest, highest = TEMPERATURES
    if _TEMPERATURE.value != 0 and not lowest <= _TEMPERATURE.value <= highest:
        raise InputError(
            f"--temperature={_TEMPERATURE.value} must be 0, or from {lowest:g} to {highest:g}"
        )


def _read_prompt(tokenizer, text: str, limit: int, chat) -> list[int]:
    """The prompt's tokens; with `chat`, the user's message in the template, up to the answer."""
    from t5x_diffeq.data.chat import TemplateError

    try:
        return tokenizer.read(text, "--prompt", limit, chat.ask if chat else None)
    except TemplateError as error:
        raise InputError(f"--prompt={text!r}: the chat template refuses it: {error}") from error


def _chat_of(tokenizer, run):
    from t5x_diffeq.data.chat import Chat

    if tokenizer.chat.template is None:
        raise InputError(
            f"--chat: the run in {_WORKDIR.value} has no chat template; tune it with "
            "--config.data.loss_on=completion --config.data.chat_template=plain (or FILE.jinja)"
        )
    return Chat(tokenizer, datetime.now(), run.placed.config.data.loss_on == "completion")


def _continue_rows(rows, run, max_tokens: int) -> None:
    import jax

    from t5x_diffeq.inference.sampling import Sampling, generate, grow

    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    prompts, key = [row.prompt for row in rows], jax.random.key(_SEED.value)
    times = [time.perf_counter()]
    generated = generate(run.placed.model, run.params, prompts, max_tokens, sampling, key)
    for _ in grow(rows, track(generated, "generating", max_tokens, "tokens")):
        times.append(time.perf_counter())
    if len(times) > 4:  # the first compiles the prompts' program, the second the step's
        rate = len(rows) * (len(times) - 3) / (times[-1] - times[2])
        log(
            f"prompts read in {times[1] - times[0]:.1f} s, compilation included; "
            f"then {rate:.1f} tokens/s"
        )
