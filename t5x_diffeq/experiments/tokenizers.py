"""The paper's tokenizers: where they are found, and whether a run was trained with them.

Perplexity is per token, so it is comparable with the paper's only under the paper's tokenizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.data.tokenizer_folder import load_tokenizer
from t5x_diffeq.experiments.runs import ExperimentRun
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_path

OWN = "own"  # --tokenizers=own: train a tokenizer on the text
KEY = "data.tokenizer"
# By architecture, what replaces `{tokenizer}` and, as a file, `{tokenizer_file}` in a text's keys.
_NAMES = {"gpt": "gpt2", "llama": "llama"}
_FILES = {"gpt": "gpt2.json", "llama": "llama.model"}
_SOURCES = {
    "gpt2.json": "https://huggingface.co/openai-community/gpt2/resolve/main/tokenizer.json",
    "llama.model": "https://huggingface.co/NousResearch/Llama-2-7b-hf/resolve/main/tokenizer.model",
}
# The tokens of this text identify the paper's tokenizers; others may have as many tokens.
_TEXT = "Hello world"
TOKENS = {"gpt": [15496, 995], "llama": [15043, 3186]}


def fill_in_tokenizer(text_keys: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """A text's keys, with the model's tokenizer substituted for the placeholders."""
    name, file = _NAMES[architecture], _FILES[architecture]
    return {
        key: value.replace("{tokenizer}", name).replace("{tokenizer_file}", file)
        if isinstance(value, str)
        else value
        for key, value in text_keys.items()
    }


def check_tokenizer_files(runs: Sequence[ExperimentRun]) -> None:
    """Checks that the tokenizer files that the trainings name exist."""
    flag = f"--config.{KEY}="
    paths = [each.removeprefix(flag) for run in runs for each in run.arguments if flag in each]
    for path in dict.fromkeys(paths):
        file = parse_path(path, "--tokenizers")
        if not file.is_file():
            raise InputError(
                f"{path}, the paper's tokenizer, is missing; download it from "
                f"{_SOURCES[file.name]}, or train tokenizers on the text with --tokenizers={OWN}, "
                "whose numbers can't be compared with the paper's"
            )


def is_papers(tokenizer: Tokenizer | None, architecture: str) -> bool:
    """Whether the tokenizer is the paper's for the architecture."""
    if tokenizer is None:
        return False
    (tokens,) = tokenizer.encode([_TEXT])
    return tokens.tolist() == TOKENS[architecture]


def remark(runs: Sequence[ExperimentRun], output: AnyPath) -> list[str]:
    """A remark on the trainings that can't be compared with the paper's; empty if all can."""
    others = []
    for run in runs:
        if run.verb == "train":
            workdir = output / run.name
            architecture = read_config(workdir).model.architecture
            if not is_papers(load_tokenizer(workdir / "tokenizer"), architecture):
                others.append(run.name)
    if not others:
        return []
    return [
        "**Not comparable with the paper's numbers.** Losses and perplexities are per token, and "
        "these runs use different tokenizers than the paper's (GPT-2's, Llama 2's): "
        f"{', '.join(others)}."
    ]
