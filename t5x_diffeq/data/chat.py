"""Writes conversations as tokens, by transformers' `apply_chat_template` and without torch.

That function takes a tokenizer of the library `tokenizers`, which `fast_tokenizer` makes.
"""

import os
import re
from contextlib import suppress
from datetime import datetime
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from t5x_diffeq.data.fast_tokenizer import fast_tokenizer
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package

_DAY_OF_DATA = datetime(2024, 7, 26)  # today for templates, so that data is the same on any day
_TIME = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_QUESTION, _ANSWER = "question", "answer"
_PROBE = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
_MOST_PASSES = 200_000  # the most passes through a template's loops and macros, per conversation
_ENDLESS = "its loops and macros were passed through"


class TemplateError(Exception):
    """A template can't write a conversation; the message says why."""


class Chat:
    """A tokenizer that writes conversations with its chat template.

    Its methods raise an InputError if the template is invalid, and `encode` and `ask` a
    TemplateError if the template rejects the conversation. `now` is the time that the template can
    ask for. `trained` says that the run was trained on conversations: in its data, each followed
    the end of another, so `ask` begins with the token that opens a document.

    Raises:
      InputError: if jinja2 or transformers isn't installed, or `fast_tokenizer` returns None.
    """

    def __init__(self, tokenizer: Tokenizer, now: datetime = _DAY_OF_DATA, trained: bool = False):
        for package in ("jinja2", "transformers"):
            need_package(package, "a chat template")
        # Otherwise transformers warns that torch is missing.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        import jinja2
        from transformers import PreTrainedTokenizerFast

        if (fast := fast_tokenizer(tokenizer, reads_names=True)) is None:
            raise InputError(
                "data.tokenizer: chat templates don't work with this sentencepiece model, which is "
                "not a plain byte-pair encoding; name its tokenizer.json instead"
            )
        self.tokenizer, self.trained = tokenizer, trained
        self._writer = PreTrainedTokenizerFast(tokenizer_object=fast)
        self._variables = {
            **tokenizer.special_tokens,
            **tokenizer.chat.tokens,
            "chat_template": _TIME.sub(
                lambda asked: repr(now.strftime(asked[2])), str(tokenizer.chat.template)
            ),
        }
        with suppress(jinja2.TemplateSyntaxError):  # `_apply` reports it
            self._variables["chat_template"] = _bounded(self._variables["chat_template"])

    def _apply(self, messages: list[dict], **arguments: Any) -> Any:
        import jinja2

        try:
            return self._writer.apply_chat_template(messages, **arguments, **self._variables)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"the chat template in {self.tokenizer.chat.origin} is invalid: {error}; correct "
                "it, or name another file with --config.data.chat_template=FILE.jinja"
            ) from error
        except Exception as error:  # a template can raise anything
            if _ENDLESS in str(error):
                raise InputError(
                    f"the chat template in {self.tokenizer.chat.origin} doesn't end: {error}; "
                    "correct it, or name another file with --config.data.chat_template=FILE.jinja"
                ) from error
            raise TemplateError(" ".join(str(error).split()) or type(error).__name__) from error

    def encode(
        self, messages: list[dict], tools: Any = None
    ) -> tuple[Integer[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """The tokens of a conversation, and which of them `{% generation %}` blocks wrote."""
        encoded = self._apply(messages, tools=tools, return_assistant_tokens_mask=True)
        return np.array(encoded["input_ids"], np.int32), np.array(encoded["assistant_masks"], bool)

    def check_marks(self) -> None:
        """Raises an InputError unless the template marks what the assistant writes, and no more."""
        try:
            tokens, marked = self.encode(_PROBE)
        except TemplateError:
            return  # a template that rejects the probe may accept the data
        marked_text = self.tokenizer.decode(tokens[marked])
        if _ANSWER not in marked_text or _QUESTION in marked_text:
            raise InputError(
                f"data.chat_template: the template in {self.tokenizer.chat.origin} doesn't mark "
                "what the assistant writes; copy it to FILE.jinja, put {% generation %} before and "
                "{% endgeneration %} after these parts, outside of macros and filters, and set "
                "--config.data.chat_template=FILE.jinja; or set it to plain"
            )

    def ask(self, question: str) -> list[int]:
        """The tokens of a user's message, and of what precedes the answer."""
        messages = [{"role": "user", "content": question}]
        tokens = self._apply(messages, add_generation_prompt=True)["input_ids"]
        opener = [self.tokenizer.border.opener] if self.trained else []
        return tokens if tokens[:1] == opener else [*opener, *tokens]

    def end_of_answer(self) -> str:
        """What the template writes after an answer, such as `<|im_end|>`; empty if nothing."""
        try:
            _, answer, end = self._apply(_PROBE, tokenize=False).rpartition(_ANSWER)
        except TemplateError:
            return ""
        return end.strip() if answer else ""


def _bounded(template: str) -> str:
    """The template with a counter, which stops it when its loops and macros begin too often.

    transformers lets no functions be given to a template, so the counter is Jinja as well. It
    consists of blocks, which leave the spaces and newlines of the template as they are.
    """
    import jinja2

    counter = (
        "{% set t5x_passes.made = t5x_passes.made + 1 %}{% if t5x_passes.made > "
        f"{_MOST_PASSES} %}}{{{{ raise_exception('{_ENDLESS} {_MOST_PASSES} times') }}}}"
    )
    pieces, tag = ["{% set t5x_passes = namespace(made=0) %}\n"], ""
    for _, kind, text in jinja2.Environment(keep_trailing_newline=True).lex(template):
        pieces.append(text)
        if kind == "block_begin":
            tag = ""
        elif kind == "name":
            tag = tag or text
        elif kind == "block_end" and tag in ("for", "macro"):
            keeps_newline = "+" if text.startswith("+") else ""
            pieces.append(f"{counter}{{% endif {keeps_newline}%}}")
    return "".join(pieces)
