"""`config.data`: the text, its tokenizer, and how examples are made of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from t5x_diffeq.config.keys import values
from t5x_diffeq.config.keys.values import Section, Values, key, one_of, reads_as_data, texts_in

_key = partial(key, finetune=True)


def _sources_of_parts(parts: Any) -> Iterable[str]:
    """The sources of a mixture's (weight, source, path) that the package doesn't define."""
    named = (part[1:2] if isinstance(part, list | tuple) else part for part in parts)
    return [text for each in named for text in texts_in(each) if text not in values.SOURCES]


def _template_files(value: object) -> Iterable[str]:
    """The file of a chat template, which is a program."""
    return [text for text in texts_in(value) if text != "plain"]


@dataclass(frozen=True)
class DataKeys(Section):
    """`config.data`: the text, its tokenizer, and how examples are made of it."""

    section = "data"
    source: Annotated[str, one_of(*values.SOURCES, values.PLUGIN)] = _key("stdlib")
    """where the text comes from: `stdlib` (the source of Python's standard library), `text_files`,
    `tfds`, `huggingface`, `stream` (a Hugging Face dataset or files, read while training),
    `wikitext103`, `tokens` (shards of `prepare_data`), `mixture`, or the importable name of a
    function that returns documents"""
    path: values.TextOrNone = _key(None, resume=True, asks=reads_as_data)
    """for `text_files`: a file, a folder or a glob. For `tfds` and `huggingface`: a name or a
    folder. For `stream`: a name, a folder, or a glob of parquet or JSON files, on this machine or
    at hf://. For `tokens`: the folder. For `wikitext103`: a copy of the Hub's dataset"""
    validation_path: values.TextOrNone = _key(None, resume=True, asks=reads_as_data)
    """for `text_files` and the files of a `stream`: the validation text. `None`: the last tenth of
    `text_files`, the `validation_split` of a `stream`"""
    text_field: values.Text = _key("text", asks=reads_as_data)
    """the field of a line, row or record that holds the text"""
    max_unreadable: values.Fraction = _key(0.001, resume=True)
    """the largest allowed share of rows (lines, records, files of text) that can't be read, because
    they are not JSON, have no text or are not UTF-8. Such rows are skipped, counted and named in
    the log; a larger share is an error ([Data](data.md#rows-that-cant-be-read))"""
    loss_on: Annotated[str, one_of("all", "completion")] = _key("all")
    """the tokens that have a loss. `all`: every token. `completion`: what the assistant wrote, in
    records with messages, or with a prompt and a completion ([Data](data.md))"""
    chat_template: values.TextOrNone = _key(None, asks=_template_files)
    """the template that turns messages into text. `None`: the tokenizer's own template
    (`chat_template.jinja` or `tokenizer_config.json` beside its file). `plain`: `User:` or
    `Assistant:` before each message. Otherwise the path of a .jinja file, with `{% generation %}`
    marks around what the assistant writes"""
    data_dir: values.TextOrNone = _key(None, resume=True, asks=reads_as_data)
    """the folder in which dataset libraries keep their files. `None`: their default"""
    train_split: values.Text = _key("train", asks=reads_as_data)
    """for `tfds`, `huggingface` and `stream`: the split to train on. For the first two also a part
    of it, such as `train[:99%]`"""
    validation_split: values.Text = _key("validation", asks=reads_as_data)
    """for `tfds`, `huggingface` and `stream`: the split to validate on. A stream without it holds
    out the first documents of the train split"""
    mixture: values.Entries = _key((), resume=True, asks=_sources_of_parts)
    """for `mixture`: (weight, source, path) of each part. Weights are shares of the examples"""
    tokenizer: values.Text = _key("sentencepiece", finetune=False, asks=reads_as_data)
    """`sentencepiece`: trained on the data by the first run. `bytes`: a token per byte. Otherwise
    the path of a SentencePiece model or of a `tokenizer.json`"""
    tokenizer_vocab_size: values.VocabSize = _key(4096, finetune=False)
    """vocabulary size of a tokenizer that is trained. A short text gives fewer tokens"""
    end_of_text: values.TextOrNone = _key(None, finetune=False, asks=reads_as_data)
    """the token that ends a document. `None`: the tokenizer's own"""
    sequence_length: values.Size = _key(256, finetune="if set")
    """tokens per example"""
    packing: Annotated[str, one_of("concat_then_split", "first_fit")] = _key("concat_then_split")
    """`concat_then_split`: documents are joined and cut into rows, without padding. `first_fit`:
    documents stay whole where they fit, and rows are padded"""
    cross_documents: values.Switch = _key(False)
    """whether attention sees earlier documents in the same row"""
    read_threads: Annotated[int, Values(int, 1, values.THREADS)] = _key(1, resume=True)
    """threads that read batches; a `stream` has one. The order of the examples does not depend on
    their number"""
