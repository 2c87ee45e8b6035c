"""Conversations as tokens: transformers' `apply_chat_template` writes them, without torch."""

import os
import re
from datetime import datetime
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from t5x_diffeq.data.fast_tokenizer import fast_tokenizer
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package

_DAY_OF_DATA = datetime(2024, 7, 26)  # so that data is the same on any day
_TIME = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_QUESTION, _ANSWER = "question", "answer"
_PROBE = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]


class TemplateError(Exception):
    """A template can't write a conversation; the message says why."""


class Chat:
    """A tokenizer that writes conversations with its chat template.

    Args:
      tokenizer: the tokenizer, with a template.
      now: the time that the template can ask for; training data has the same one on any day.

    Raises:
      InputError: if transformers isn't installed, or has no such tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, now: datetime = _DAY_OF_DATA):
        for package in ("jinja2", "transformers"):
            need_package(package, "a chat template")
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing
        from transformers import PreTrainedTokenizerFast

        if (fast := fast_tokenizer(tokenizer)) is None:
            raise InputError(
                "data.tokenizer is a sentencepiece model that is not a plain byte-pair encoding, "
                "and transformers has no chat templates for it; name its tokenizer.json"
            )
        self.tokenizer = tokenizer
        self._writer = PreTrainedTokenizerFast(tokenizer_object=fast)
        self._variables = {
            **tokenizer.special_tokens,
            **tokenizer.chat.tokens,
            "chat_template": _TIME.sub(
                lambda asked: repr(now.strftime(asked[2])), str(tokenizer.chat.template)
            ),
        }

    def _apply(self, messages: list[dict], **arguments: Any) -> Any:
        import jinja2

        try:
            return self._writer.apply_chat_template(messages, **arguments, **self._variables)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(
                f"the chat template of {self.tokenizer.chat.origin} is invalid: {error}; fix it, "
                "or name another with --config.data.chat_template=FILE"
            ) from error
        except Exception as error:  # a template can raise anything
            raise TemplateError(" ".join(str(error).split()) or type(error).__name__) from error

    def encode(
        self, messages: list[dict], tools: Any = None
    ) -> tuple[Integer[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """The tokens of a conversation, and which of them `{% generation %}` blocks wrote.

        Raises:
          TemplateError: if the template rejects the conversation.
          InputError: if the template is invalid.
        """
        found = self._apply(messages, tools=tools, return_assistant_tokens_mask=True)
        return np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], bool)

    def check_marks(self) -> None:
        """Checks that the template marks what the assistant writes, and no more.

        Raises:
          InputError: if it doesn't, or is invalid.
        """
        try:
            tokens, marked = self.encode(_PROBE)
        except TemplateError:
            return  # it wants other conversations
        said = self.tokenizer.decode(tokens[marked])
        if _ANSWER not in said or _QUESTION in said:
            raise InputError(
                f"data.chat_template: the template of {self.tokenizer.chat.origin} doesn't mark "
                "what the assistant writes; put it between {% generation %} and {% endgeneration "
                "%}, outside of macros and filters, and name the file with "
                "--config.data.chat_template=FILE.jinja, or =plain"
            )

    def ask(self, question: str) -> list[int]:
        """The tokens of a user's message, and of what precedes the answer.

        Raises:
          TemplateError: if the template rejects it.
          InputError: if the template is invalid.
        """
        messages = [{"role": "user", "content": question}]
        return self._apply(messages, add_generation_prompt=True)["input_ids"]

    def end_of_answer(self) -> str:
        """What the template writes after an answer, such as `<|im_end|>`; empty if nothing."""
        try:
            _, found, end = self._apply(_PROBE, tokenize=False).rpartition(_ANSWER)
        except TemplateError:
            return ""
        return end.strip() if found else ""
