"""Tokenizers that are read from a file: a sentencepiece model, or a `tokenizer.json`."""

import io
import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import sentencepiece
from jaxtyping import Integer

from t5x_diffeq.data.tokenizer import MODEL_FILES, Tokenizer, TokenSequence
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.extras import need_package
from t5x_diffeq.system.files import describe_error, digest

MODEL_FILE, JSON_FILE, _ = MODEL_FILES  # in the folder of a run
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_LINE_CHARACTERS = 1000  # sentencepiece skips lines longer than about 4000 bytes


class FileTokenizer(Tokenizer):
    """The base class of tokenizers that are read from a file, which names its tokens."""

    @abstractmethod
    def token_id(self, name: str) -> int | None:
        """The token of this name, if there is one."""

    @abstractmethod
    def token_name(self, token: int) -> str:
        """The name of a token."""

    def open_with(self, token: int | None) -> None:
        """Makes this token the opener of every text; None: texts have no opener."""
        self.opener = token
        if token is not None:
            self.special_tokens = {**self.special_tokens, "bos_token": self.token_name(token)}


class SentencePieceTokenizer(FileTokenizer):
    """A sentencepiece model (Kudo and Richardson 2018), such as Llama's and T5's.

    `end_of_text` names the token that ends a document; None selects the model's own.

    Raises:
      InputError: if the model has no such token.
      RuntimeError: if the content isn't a sentencepiece model.
    """

    _file = MODEL_FILE

    def __init__(self, model: bytes, end_of_text: str | None = None):
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self.processor.get_piece_size()
        self.end_of_text = self.processor.eos_id()
        if end_of_text is not None:
            self.end_of_text = self.processor.piece_to_id(end_of_text)
        unknown = self.processor.unk_id()
        if self.end_of_text < 0 or (end_of_text is not None and self.end_of_text == unknown):
            raise InputError(
                f"the tokenizer has no token {end_of_text or 'of its own'} to end a document; "
                "name one that it has with --config.data.end_of_text"
            )
        super().__init__(model, self.processor.id_to_piece(self.end_of_text))
        if (start := self.processor.bos_id()) >= 0:
            named = {"bos_token": self.processor.id_to_piece(start)}
            self.special_tokens = {**named, **self.special_tokens}
        self.fingerprint = digest([model, str(self.end_of_text).encode()])

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "SentencePieceTokenizer":
        """Trains a byte-pair encoding that preserves text: newlines, indents, any character.

        The exception is U+2581, sentencepiece's own symbol for a space: it decodes as a space.
        There are fewer tokens than `vocab_size` if the texts have no more to merge.

        Raises:
          InputError: if there is no text, or too small a vocabulary for the texts' characters.
        """
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_lines(texts),
                model_writer=model,
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                model_type="bpe",
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                byte_fallback=True,
                split_digits=True,
                # `_lines` leaves newlines out of the texts, so none would be learned.
                user_defined_symbols=["\n"],
                num_threads=os.cpu_count(),
                minloglevel=2,
            )
        except RuntimeError as error:
            if "sentences_.empty()" in str(error):
                raise InputError(
                    "the documents have no text to train a tokenizer on; check what data.path names"
                ) from error
            if needed := re.search(r"smaller than required_chars\. (\d+) vs (\d+)", str(error)):
                least = max(map(int, needed.groups()))
                raise InputError(
                    f"data.tokenizer_vocab_size={vocab_size}: this text has {least} characters and "
                    f"special tokens; set at least {least}, or data.tokenizer=bytes"
                ) from error
            raise InputError(
                f"data.tokenizer_vocab_size={vocab_size}: sentencepiece can't train it on this "
                f"text: {describe_error(error)}; choose another, or data.tokenizer=bytes"
            ) from error
        return cls(model.getvalue())

    def token_id(self, name: str) -> int | None:
        """The token of this name, if there is one."""
        token: int = self.processor.piece_to_id(name)
        return token if self.token_name(token) == name else None

    def token_name(self, token: int) -> str:
        """The name of a token."""
        return str(self.processor.id_to_piece(token))

    def _encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " length"]]:
        encoded = self.processor.encode(list(texts), num_threads=self.threads)
        return [np.asarray(tokens, np.int32) for tokens in encoded]

    def _decode(self, tokens: TokenSequence) -> str:
        return self.processor.decode([int(token) for token in tokens])


class HuggingFaceTokenizer(FileTokenizer):
    """A `tokenizer.json` of the Hugging Face library, such as GPT-2's byte-pair encoding.

    `end_of_text` names the token that ends a document; None: the first of `ENDS_OF_TEXT` it has.

    Raises:
      InputError: if it has no such token, or the library isn't installed.
      ValueError: if the content isn't a `tokenizer.json`.
    """

    _file = JSON_FILE

    def __init__(self, model: bytes, end_of_text: str | None = None):
        need_package("tokenizers", "tokenizer.json")
        import tokenizers

        try:
            self.processor = tokenizers.Tokenizer.from_str(model.decode("utf-8"))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{error}") from error
        # The file's post-processor adds no tokens with add_special_tokens=False, but it may leave
        # spaces out of offsets.
        self.processor.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        self.processor.no_padding()
        self.processor.no_truncation()
        candidates = ENDS_OF_TEXT if end_of_text is None else (end_of_text,)
        vocabulary = self.processor.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # some ids can be unused
        end = next((token for token in candidates if token in vocabulary), None)
        if end is None:
            raise InputError(
                f"the tokenizer has none of the tokens {', '.join(candidates)} to end a document; "
                "name one that it has with --config.data.end_of_text"
            )
        super().__init__(model, end)
        self.end_of_text = vocabulary[end]
        self.fingerprint = digest([model, str(self.end_of_text).encode()])

    def token_id(self, name: str) -> int | None:
        """The token of this name, if there is one."""
        token: int | None = self.processor.token_to_id(name)
        return token

    def token_name(self, token: int) -> str:
        """The name of a token."""
        return str(self.processor.id_to_token(token))

    def _encode(self, texts: Sequence[str]) -> list[Integer[np.ndarray, " length"]]:
        if self.threads == 1:  # the library divides a batch among all cores
            encoded = [self.processor.encode(text, add_special_tokens=False) for text in texts]
        else:
            encoded = self.processor.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(tokens.ids, np.int32) for tokens in encoded]

    def _decode(self, tokens: TokenSequence) -> str:
        return self.processor.decode([int(token) for token in tokens], skip_special_tokens=False)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), _LINE_CHARACTERS):
                yield line[start : start + _LINE_CHARACTERS]
