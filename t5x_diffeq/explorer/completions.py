"""OpenAI's completions, as far as a language model at a depth can answer them.

The name of a model is that of a run, with a number of steps and a scheme if they aren't the run's
own: `tiny`, `tiny@12`, `tiny@12:heun`.
"""

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from t5x_diffeq.explorer.answers import Answer, Explorer, to_json
from t5x_diffeq.explorer.fields import Fields, check_fields, shorten
from t5x_diffeq.explorer.grids import MOST_STEPS, Depth
from t5x_diffeq.explorer.stepping import TOP, Drawn
from t5x_diffeq.inference.continuation import Continuation
from t5x_diffeq.inference.sampling import Sampling
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.keys.values import INT32, SEEDS, Values

_MOST_ROWS = 16  # completions of one request
_MOST_STOPS = 4
_LONGEST_STOP = 200  # characters
_FIELDS = {
    "model": Values(str),
    "max_tokens": Values(int, 0, INT32),
    "temperature": Values(float, 0, 1000),
    "top_p": Values(float, 0, 1, "(]"),
    "n": Values(int, 1, _MOST_ROWS),
    "seed": Values(int, 0, SEEDS - 1),
    "stream": Values(bool),
    "echo": Values(bool),
    "logprobs": Values(int, 0, TOP),
    "user": Values(str, can_be_empty=True),
}
_NEUTRAL: dict[str, tuple] = {  # fields that are accepted with the values that change nothing
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "stream_options": (None, {}, {"include_usage": False}),
}
_MODEL = re.compile(r"(.+?)(?:@(\d{1,5})(?::([a-z_0-9:]+))?)?", re.DOTALL)


class Piece(NamedTuple):
    """What one token adds to a completion.

    Attributes:
      text: text that no later token can change.
      drawn: the token; None if none was drawn.
      finish_reason: "stop" at a stop or at the end of a document, "length" at the limit, or None.
    """

    text: str
    drawn: Drawn | None
    finish_reason: str | None


@dataclass(frozen=True)
class Completions:
    """A request whose fields are checked.

    Attributes:
      explorer: the run.
      model: the name that the request gave.
      grid: the grid.
      prompts: the tokens of each prompt.
      count: completions of each prompt.
      limit: most tokens of a completion.
      sampling: how tokens are drawn.
      seed: seed of the first completion of a prompt; the next have the numbers after it.
      stops: texts that end a completion.
      stream: whether pieces are sent as they come.
      echo: whether a completion begins with its prompt.
      logprobs: number of likeliest tokens to tell of; None to tell no probabilities.
    """

    explorer: Explorer
    model: str
    grid: Depth
    prompts: list[list[int]]
    count: int
    limit: int
    sampling: Sampling
    seed: int
    stops: list[str]
    stream: bool
    echo: bool
    logprobs: int | None

    @classmethod
    def of(cls, body: object, explorers: Mapping[str, Explorer]) -> "Completions":
        """Checks a request's body.

        Raises:
          InputError: if a field is invalid.
        """
        fields, prompts, stops = _check_body(body)
        explorer, grid = find_model(fields["model"], explorers)
        count = fields["n"] or 1
        if len(prompts) * count > _MOST_ROWS:
            raise InputError(
                f"{len(prompts)} prompts with n={count} make {len(prompts) * count} completions; "
                f"a request may have {_MOST_ROWS}"
            )
        temperature = 1.0 if fields["temperature"] is None else float(fields["temperature"])
        if 0 < temperature < 1e-3:
            raise InputError(f"temperature is {temperature}; it must be 0, or at least 0.001")
        return cls(
            explorer=explorer,
            model=fields["model"],
            grid=grid,
            prompts=[_tokens_of(explorer, prompt) for prompt in prompts],
            count=count,
            limit=16 if fields["max_tokens"] is None else fields["max_tokens"],
            sampling=Sampling(temperature, None, float(fields["top_p"] or 1)),
            seed=secrets.randbelow(SEEDS) if fields["seed"] is None else fields["seed"],
            stops=stops,
            stream=bool(fields["stream"]),
            echo=bool(fields["echo"]),
            logprobs=fields["logprobs"],
        )

    def choices(self) -> Iterator[Answer]:
        """Yields the choices in pieces of a token, one choice after the other.

        They are as OpenAI has them, and have `tokens` besides: how many tokens the piece adds.
        """
        for number in range(len(self.prompts) * self.count):
            prompt = self.prompts[number // self.count]
            offset = 0
            if self.echo:
                text = self.explorer.tokenizer.decode(prompt)
                probabilities = None if self.logprobs is None else self._of_prompt(prompt)
                yield _choice(number, text, probabilities, None, 0)
                offset = len(text)
            for piece in self._continue(prompt, (self.seed + number % self.count) % SEEDS):
                probabilities = self._of_drawn(piece.drawn, offset)
                tokens = int(piece.drawn is not None)
                yield _choice(number, piece.text, probabilities, piece.finish_reason, tokens)
                offset += len(piece.text)

    def _continue(self, prompt: list[int], seed: int) -> Iterator[Piece]:
        stepper, tokenizer = self.explorer.stepper, self.explorer.tokenizer
        row, sent = Continuation(tokenizer, prompt, limit=self.limit), ""
        drawn = stepper.draw(prompt, self.grid, self.sampling, seed) if self.limit else ()
        for each in drawn:
            row.add(each.token)
            text = row.completion()
            ends = [text.find(stop) for stop in self.stops if stop in text]
            at_end = each.token == tokenizer.end_of_text
            reason = "stop" if ends or at_end else "length" if row.ended else None
            whole = text[: min(ends)] if ends else text if reason else self._certain(text)
            yield Piece(whole[len(sent) :], None if at_end else each, reason)
            sent = max(sent, whole, key=len)
            if reason:
                return
        yield Piece(row.completion()[len(sent) :], None, "length")  # no token fits any more

    def _certain(self, text: str) -> str:
        """The text without bytes of an unfinished character, and what may be a stop's beginning."""
        text = text.rstrip("\ufffd")
        held = [n for s in self.stops for n in range(1, len(s)) if text.endswith(s[:n])]
        return text[: len(text) - max(held, default=0)]

    def _of_drawn(self, drawn: Drawn | None, offset: int) -> Answer | None:
        if self.logprobs is None or drawn is None:
            return None
        return self._log_probabilities(
            [drawn.token], [drawn.log_p], [drawn.top], [drawn.top_log_p], [offset]
        )

    def _of_prompt(self, prompt: list[int]) -> Answer:
        """What `echo` tells of a prompt's tokens: nothing of the first, which nothing predicts."""
        look = self.explorer.stepper.read(prompt, self.grid)
        texts = self.explorer.tokenizer.pieces(prompt)
        offsets = np.cumsum([0, *map(len, texts[:-1])]).tolist()
        told = self._log_probabilities(
            prompt,
            [0.0, *-look.loss[0, :-1]],
            [look.top[0, 0], *look.top[0, :-1]],
            [look.log_p[0, 0], *look.log_p[0, :-1]],
            offsets,
        )
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told

    def _log_probabilities(
        self, tokens: list[int], log_p: list, top: list, top_log_p: list, offsets: list[int]
    ) -> Answer:
        def text(token: int) -> str:
            return self.explorer.tokenizer.decode([token])

        best = [
            {text(int(each)): to_json(float(p)) for each, p in zip(row, of_row, strict=True)}
            for row, of_row in zip(top, top_log_p, strict=True)
        ]
        count = self.logprobs or 0
        return {
            "tokens": [text(token) for token in tokens],
            "token_logprobs": to_json([float(each) for each in log_p]),
            "top_logprobs": [dict(list(row.items())[:count]) for row in best],
            "text_offset": offsets,
        }

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(map(len, self.prompts))


def _choice(
    index: int, text: str, logprobs: Answer | None, finish_reason: str | None, tokens: int
) -> Answer:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "tokens": tokens,
    }


def join_choices(pieces: list[Answer]) -> list[Answer]:
    """Whole choices from the pieces of `Completions.choices`."""
    whole: dict[int, Answer] = {}
    for piece in pieces:
        piece = {name: value for name, value in piece.items() if name != "tokens"}
        choice = whole.setdefault(piece["index"], {**piece, "text": "", "logprobs": None})
        choice["text"] += piece["text"]
        choice["finish_reason"] = piece["finish_reason"]
        if piece["logprobs"] and choice["logprobs"]:
            for name, values in piece["logprobs"].items():
                choice["logprobs"][name] += values
        elif piece["logprobs"]:
            choice["logprobs"] = piece["logprobs"]
    return [whole[index] for index in sorted(whole)]


def find_model(name: str, explorers: Mapping[str, Explorer]) -> tuple[Explorer, Depth]:
    """The run and the grid that a model's name says.

    Raises:
      InputError: if there is no such run, or it doesn't exist on the grid.
    """
    said = _MODEL.fullmatch(name)
    run, steps, scheme = said.groups() if said else (name, None, None)
    if run not in explorers:
        raise InputError(
            f"there is no model {shorten(name)}; there are {', '.join(explorers)}, with a depth as "
            "in NAME@12 or NAME@12:heun"
        )
    if steps is not None and not 1 <= int(steps) <= MOST_STEPS:
        raise InputError(f"model is {shorten(name)}; its steps must be from 1 to {MOST_STEPS}")
    return explorers[run], explorers[run].grid(int(steps) if steps else None, scheme)


def _check_body(body: object) -> tuple[Fields, list[str | list[int]], list[str]]:
    """The plain fields, the prompts and the stops."""
    plain = dict(body) if isinstance(body, dict) else body
    prompt, stop = None, None
    if isinstance(plain, dict):
        prompt, stop = plain.pop("prompt", None), plain.pop("stop", None)
        for name, values in _NEUTRAL.items():
            if (value := plain.pop(name, None)) not in values:
                raise InputError(
                    f"{name} is {shorten(value)}, which is not supported; leave it out"
                )
    fields = check_fields(plain, _FIELDS, ("model",))
    return fields, _prompts_of(prompt), _stops_of(stop)


def _prompts_of(prompt: object) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(each, str) for each in prompt):
            return prompt
        if all(map(_is_token, prompt)):
            return [prompt]
        if all(isinstance(each, list) and each and all(map(_is_token, each)) for each in prompt):
            return prompt
    raise InputError(
        f"prompt is {shorten(prompt)}; it must be a text, a list of texts, or one or several lists "
        "of tokens"
    )


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stops_of(stop: object) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise InputError(f"stop is {shorten(stop)}; it must be a text or a list of texts")
    if len(stops) > _MOST_STOPS:
        raise InputError(f"stop has {len(stops)} texts; it may have {_MOST_STOPS}")
    if max(map(len, stops), default=0) > _LONGEST_STOP:
        raise InputError(f"stop has a text of more than {_LONGEST_STOP} characters; shorten it")
    return stops


def _tokens_of(explorer: Explorer, prompt: str | list[int]) -> list[int]:
    """The tokens of a prompt, at least one: an empty text begins a document."""
    if isinstance(prompt, str):
        return explorer.tokens(prompt) if prompt else [explorer.tokenizer.border.opener]
    last = explorer.tokenizer.vocab_size - 1
    for token in prompt:
        if not 0 <= token <= last:
            raise InputError(f"prompt has the token {token}; tokens are 0 to {last}")
    if len(prompt) > explorer.config.max_length:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, and the model's length is "
            f"{explorer.config.max_length}"
        )
    return prompt
