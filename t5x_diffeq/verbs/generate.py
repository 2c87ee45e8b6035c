"""Text: prompts from the command line, continued by a trained run."""

import json
import time
from datetime import datetime

import jax
from absl.flags import FlagValues

from t5x_diffeq.data.chat import Chat, TemplateError
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.inference.continuation import Continuation, grow
from t5x_diffeq.inference.sampling import Sampling, generate
from t5x_diffeq.runs.load import Run, load_run
from t5x_diffeq.runtime.console import say, track
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath, parse_path

_OPENING = 16  # tokens of the validation text that form the prompt if none is given


def _encode_prompt(
    tokenizer: Tokenizer, text: str, max_length: int, chat: Chat | None
) -> list[int]:
    """The prompt's tokens; with a template, of a user's message and what precedes the answer."""
    try:
        if chat:
            tokens = chat.ask(text)
            opener = tokenizer.border.opener  # which opens a conversation in training
            tokens = tokens if tokens[:1] == [opener] else [opener, *tokens]
        else:
            tokens = tokenizer.encode([text])[0].tolist()
    except UnicodeEncodeError as error:
        raise InputError(f"--prompt={text!r} is not UTF-8 text") from error
    except TemplateError as error:
        raise InputError(f"--prompt={text!r}: the chat template refuses it: {error}") from error
    if len(tokens) >= max_length:
        raise InputError(
            f"--prompt has {len(tokens)} tokens, and the model's length is {max_length}; "
            "shorten the prompt"
        )
    return tokens


def _chat_of(tokenizer: Tokenizer, workdir: AnyPath) -> Chat:
    if tokenizer.chat.template is None:
        raise InputError(
            f"--chat: the run in {workdir} has no chat template; tune it with "
            "--config.data.loss_on=completion --config.data.chat_template=plain (or FILE.jinja)"
        )
    return Chat(tokenizer, datetime.now())


def _continue_rows(rows: list[Continuation], run: Run, max_tokens: int, flags: FlagValues) -> None:
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p)
    prompts, key = [row.prompt for row in rows], jax.random.key(flags.seed)
    times = [time.perf_counter()]
    generated = generate(run.placed.model, run.params, prompts, max_tokens, sampling, key)
    for _ in grow(rows, track(generated, "generating", max_tokens, "tokens")):
        times.append(time.perf_counter())
    if len(times) > 4:  # the first compiles the prompts' program, the second the step's
        rate = len(rows) * (len(times) - 3) / (times[-1] - times[2])
        say(
            f"prompts read in {times[1] - times[0]:.1f} s, compilation included; "
            f"then {rate:.1f} tokens/s"
        )


def continue_prompts(workdir: AnyPath, flags: FlagValues) -> None:
    """Prints each prompt with its continuation, or with `flags.chat` the answer to each."""
    corpus = load_corpus(workdir)
    tokenizer = corpus.tokenizer
    run = load_run(
        workdir,
        tokenizer.vocab_size,
        batch_size=1,
        checkpoint=flags.checkpoint,
        averages=flags.averages,
        grids=[(flags.num_steps, None)],
        methods=("extend", "empty_cache"),
        adapters=parse_path(flags.adapters, "--adapters") if flags.adapters else None,
    ).at_depth(flags.num_steps)
    limit = run.placed.model.config.max_length
    opening = corpus.parts[0].validation[0][: min(_OPENING, limit // 2)]
    texts = flags.prompt or [tokenizer.decode(opening)]
    chat = _chat_of(tokenizer, workdir) if flags.chat else None
    stops = [*flags.stop, *([end] if chat and (end := chat.end_of_answer()) else [])]
    rows = [
        Continuation(tokenizer, _encode_prompt(tokenizer, text, limit, chat), stops)
        for text in texts
    ]
    room = limit - max(len(row.prompt) for row in rows)
    if flags.max_tokens > room:
        say(f"--max_tokens={flags.max_tokens} is too large: {room} fit after the prompt")
    with run.placed.context():
        _continue_rows(rows, run, min(flags.max_tokens, room), flags)
    for row in rows:
        text = row.completion() if chat else row.text()
        print(text if len(rows) == 1 else json.dumps({"text": text}), flush=True)
