"""Chat templates in the styles of today's models, a tokenizer for them, and conversations."""

from functools import cache

from sentencepiece import sentencepiece_model_pb2 as pb2

from t5x_diffeq.data.chat_template import PLAIN_TEMPLATE, ChatFormat
from t5x_diffeq.data.file_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from t5x_diffeq.data.tokenizer import ByteTokenizer, Tokenizer

# Without marks of what the assistant writes, as most templates are.
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Marks what the assistant writes, and refuses to begin with the assistant.
MARKED = """\
{%- for message in messages %}
    {%- if loop.first and message['role'] == 'assistant' %}
        {{- raise_exception('the user speaks first') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim }}{{- '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content | trim }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# Ends every answer with the token that also ends documents; no generation prompt.
INSTRUCT = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- message | tojson }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"plain": PLAIN_TEMPLATE, "marked": MARKED, "headers": HEADERS, "instruct": INSTRUCT}
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
FILE_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
TWO_TURNS = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Say é."},
    {"role": "assistant", "content": "é 日本"},
    {"role": "user", "content": "Again, <b>loud</b>!"},
    {"role": "assistant", "content": "É!\n\nÉ!"},
]


@cache
def tokenizer_json():
    """A byte-level BPE with the special tokens of the templates."""
    import tokenizers

    bpe = tokenizers.ByteLevelBPETokenizer()
    texts = [message["content"] for message in TWO_TURNS] * 9
    bpe.train_from_iterator(texts, vocab_size=300, special_tokens=SPECIAL)
    return bpe.to_str().encode()


@cache
def _sentencepiece():
    return SentencePieceTokenizer.train([CHATML, INSTRUCT, "é 日本"] * 20, 330).model


def with_dummy_prefix(model: bytes) -> bytes:
    """A sentencepiece model that puts a space before every text, as Llama's does."""
    proto = pb2.ModelProto.FromString(model)
    proto.normalizer_spec.add_dummy_prefix = True
    return proto.SerializeToString()


def chat_tokenizer_of(kind: str, template: str = MARKED) -> Tokenizer:
    """A tokenizer with a chat template: bytes, json, sentencepiece or prefixed."""
    made: Tokenizer
    if kind == "bytes":
        made = ByteTokenizer()
    elif kind == "json":
        made = HuggingFaceTokenizer(tokenizer_json())
    else:
        model = _sentencepiece()
        made = SentencePieceTokenizer(with_dummy_prefix(model) if kind == "prefixed" else model)
    made.chat = ChatFormat(template, FILE_TOKENS if kind == "json" else {})
    return made
