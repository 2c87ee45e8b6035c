"""Encodes documents as codes: each code is a token, and says whether the token's loss counts.

With data.loss_on=completion, some tokens are read but not trained on, and a chat template can write
`end_of_text` within a document. So documents of conversations hold codes instead of tokens:

- `token`: the token is trained on. The code `end_of_text` ends its document;
- `token + 2**30`: the token is an `end_of_text` within its document, and is trained on;
- `~code`, which is negative: the token of `code` is not trained on.

Tokens are below 2**30. So the tokens of plain texts are codes, too, which are all trained on.

An encoder first cuts documents into pieces, whose lengths are known, then encodes many pieces at
once, without the `end_of_text` that closes a document. A long plain text has several pieces; a
conversation has one.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from t5x_diffeq.data.chat import Chat, TemplateError
from t5x_diffeq.data.conversations import ANSWERER, find_conversation_fault, find_text_fault
from t5x_diffeq.data.rows import Skipped, Unreadable
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import digest, parse_json

PIECE_CHARACTERS = 1_000_000  # longer documents are cut into pieces, after a newline or a space
_REASON_CHARACTERS = 100  # the longest reason for skipping a document that is reported
CODE_DTYPE = np.dtype("<i4")
_WITHIN = 2**30
Codes = Integer[np.ndarray, "..."]


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype that can hold every token."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def encode_tokens(tokens: Codes, trained: Bool[np.ndarray, " length"], end_of_text: int) -> Codes:
    """The codes of tokens within a document, so that none of them ends it."""
    codes = tokens.astype(CODE_DTYPE)
    codes[codes == end_of_text] += _WITHIN
    return np.where(trained, codes, ~codes)


def is_trained(codes: Codes) -> Bool[np.ndarray, "..."]:
    """Whether the loss of each token counts."""
    return codes >= 0


def tokens_of(codes: Codes) -> Codes:
    """The token of each code."""
    if codes.dtype.kind == "u":
        return codes  # all tokens of the document are trained on
    return np.where(codes < 0, ~codes, codes) & (_WITHIN - 1)


class TextEncoder:
    """Encodes plain texts, of which every token is trained on.

    `end_of_text` is the token that closes each document; `dtype` is the dtype of codes in files.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.end_of_text = tokenizer, tokenizer.end_of_text
        self.dtype = token_dtype(tokenizer.vocab_size)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the codes of a document."""
        return self.tokenizer.fingerprint

    def cut(self, documents: Iterable[str], skipped: Skipped) -> Iterator[tuple[Any, bool]]:
        """Yields the pieces of documents, and whether each is the last piece of its document.

        Documents that can't be trained on are counted in `skipped`, by reason.
        """
        for text in documents:
            reason = text.reason if isinstance(text, Unreadable) else find_text_fault(text)
            if reason:
                skipped.skip(text, reason)
                continue
            start = 0
            while len(text) - start > PIECE_CHARACTERS:
                stop = start + PIECE_CHARACTERS
                cut = max(text.rfind(mark, start, stop) for mark in "\n ") + 1
                yield text[start : cut or stop], False
                start = cut or stop
            yield text[start:], True

    def encode(self, pieces: Sequence[Any]) -> list[Codes]:
        """The codes of each piece."""
        return self.tokenizer.encode(pieces)


class ConversationEncoder(TextEncoder):
    """Encodes conversations, of which only what the assistant wrote is trained on.

    Tokens after the last one that is trained on are left out: nothing is learned from them.
    """

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        self.dtype = CODE_DTYPE

    @property
    def fingerprint(self) -> str:
        """A hash of the tokenizer, its opener and its chat template."""
        opener = [] if self.tokenizer.opener is None else [f"after {self.tokenizer.opener}"]
        parts = (self.tokenizer.fingerprint, self.tokenizer.chat.fingerprint, "completion", *opener)
        return digest(map(str.encode, parts))

    @cached_property
    def chat(self) -> Chat:
        """The chat that writes records with messages; an InputError if it can't mark answers."""
        if self.tokenizer.chat.template is None:
            raise InputError(
                "data.loss_on=completion: the records have messages, but the tokenizer has no chat "
                "template to write them with; set --config.data.chat_template=plain, or FILE.jinja"
            )
        chat = Chat(self.tokenizer)
        chat.check_marks()
        return chat

    def cut(self, documents: Iterable[str], skipped: Skipped) -> Iterator[tuple[Any, bool]]:
        """The codes of each conversation up to the last token that is trained on."""
        for document in documents:
            reason = document.reason if isinstance(document, Unreadable) else None
            if not reason:
                conversation = parse_json(document)
                reason = find_conversation_fault(conversation)
            if not reason:
                try:
                    yield self._encode(conversation), True
                    continue
                except TemplateError as error:
                    reason = f"rejected by the chat template ({error})"[:_REASON_CHARACTERS]
            skipped.skip(document, reason)

    def encode(self, pieces: Sequence[Any]) -> list[Codes]:
        """The pieces, which `cut` has encoded already."""
        return [*pieces]

    def _encode(self, conversation: dict) -> Codes:
        if "prompt" in conversation:
            prompt, completion = conversation["prompt"], conversation["completion"]
            before, tokens = self.tokenizer.encode([prompt, prompt + completion])
            size = min(len(before), len(tokens))
            # The prompt's tokens are the prefix that the two encodings share. A token that holds
            # the end of the prompt and the start of the completion is trained on.
            prompt_tokens = np.cumprod(before[:size] == tokens[:size]).sum()
            trained = np.arange(len(tokens)) >= prompt_tokens
        else:
            tokens, trained = self.chat.encode(conversation["messages"], conversation.get("tools"))
            if not trained.any():
                raise TemplateError(f"it leaves out the messages of the {ANSWERER}")
        stop = int(np.flatnonzero(trained).max(initial=-1)) + 1
        if stop and tokens[stop - 1] == self.end_of_text:
            stop -= 1  # the template has written the token that closes the document
        start = int(stop > 0 and tokens[0] == self.tokenizer.opener)  # windows add the opener
        return encode_tokens(tokens[start:stop], trained[start:stop], self.end_of_text)


def encoder_of(tokenizer: Tokenizer, conversations: bool) -> TextEncoder:
    """The encoder of conversations, or of plain texts."""
    return ConversationEncoder(tokenizer) if conversations else TextEncoder(tokenizer)
