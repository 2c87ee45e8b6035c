"""`config.data`: the text, its tokenizer, and how examples are made of it."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from t5x_diffeq.runtime.keys.key import (
    Entries,
    Section,
    Size,
    Switch,
    Text,
    TextOrNone,
    VocabSize,
    key,
    one_of,
)
from t5x_diffeq.runtime.keys.values import THREADS, Values

_key = partial(key, finetune=True)


@dataclass(frozen=True)
class DataKeys(Section):
    """`config.data`: the text, its tokenizer, and how examples are made of it."""

    section = "data"
    source: Text = _key(
        "stdlib",
        """the source of Python's standard library | text_files | tfds | wikitext103 |
        huggingface | stream (a Hugging Face dataset or files, read while training) | tokens (shards
        of prepare_data) | mixture | the importable name of a function
        that returns documents (t5x_diffeq/blocks/README.md)""",
    )
    path: TextOrNone = _key(
        None,
        """text_files: a file, a folder or a glob; tokens: the folder; tfds, huggingface: a name or
        folder; stream: a name, a folder, or a glob of parquet or JSON files, here or behind hf://;
        wikitext103: another name or folder than that of the Hub""",
    )
    validation_path: TextOrNone = _key(
        None, "text_files, stream: the validation text; None: the last tenth, or validation_split"
    )
    text_field: Text = _key("text", "the field of a line, row or record that holds the text")
    loss_on: Annotated[str, one_of("all", "completion")] = _key(
        "all",
        """the tokens that have a loss: all | completion: what the assistant wrote, in records with
        messages, or with a prompt and a completion (t5x_diffeq/data/README.md)""",
    )
    chat_template: TextOrNone = _key(
        None,
        """a .jinja file that writes messages as text; None: the tokenizer's own
        (chat_template.jinja or tokenizer_config.json beside its file) | plain: User: and Assistant:
        before each message""",
    )
    data_dir: TextOrNone = _key(None, "where libraries keep datasets; None: their default")
    train_split: Text = _key("train", 'of tfds and huggingface, such as "train[:99%]"; of stream')
    validation_split: Text = _key("validation", "likewise")
    mixture: Entries = _key(
        (), "(weight, source, path) of each part; weights are shares of the examples"
    )
    tokenizer: Text = _key(
        "sentencepiece",
        """trained on the data by the first run | bytes | the path of a sentencepiece model or a
        tokenizer.json""",
        finetune=False,
    )
    tokenizer_vocab_size: VocabSize = _key(
        4096, "of a tokenizer that is trained; a short text gives fewer", finetune=False
    )
    end_of_text: TextOrNone = _key(
        None, "the token that ends a document; None: the tokenizer's own", finetune=False
    )
    sequence_length: Size = _key(256, "tokens of an example", finetune="if set")
    packing: Annotated[str, one_of("concat_then_split", "first_fit")] = _key(
        "concat_then_split",
        "no padding | first_fit: documents stay whole where they fit, and the rest is padded",
    )
    cross_documents: Switch = _key(False, "whether attention reaches into earlier documents")
    read_threads: Annotated[int, Values(int, 1, THREADS)] = _key(
        1, "threads that read batches; the order does not depend on it", resume=True
    )
