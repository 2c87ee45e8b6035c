"""Makes evaluation tasks from a run's validation text.

    python -m studies.make_tasks --workdir=DIR --output=FOLDER

The tasks need no download. own_ending asks which of four endings belongs to a passage, like
HellaSwag; last_word asks for the last word of a passage, like LAMBADA. Passages are as long as the
model allows and begin and end at a word. They depend on the text, the tokenizer and the length
only.
"""

import json
import re

import numpy as np

from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.cli import command_line, flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.data.corpus import load_corpus
from t5x_diffeq.data.examples import eval_examples
from t5x_diffeq.data.tokenizer import Tokenizer, TokenSequence
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, write_whole

_PASSAGES, _CHOICES, _FEWEST_WORDS = 1000, 4, 4
_TASKS = {
    "own_ending": """
output_type: multiple_choice
doc_to_text: "{{beginning}}"
doc_to_choice: endings
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "last_word": """
output_type: loglikelihood
doc_to_text: "{{before}}"
doc_to_target: "{{last}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: perplexity}]
""",
}

FLAGS = VerbFlags("studies.make_tasks")
_WORKDIR = FLAGS.define_workdir()
_OUTPUT = FLAGS.define_text("output", "Folder for the task files.")


def main() -> None:
    """The command."""
    workdir = flag_values.parse_folder(_WORKDIR, "make_tasks")
    make_tasks(workdir, flag_values.parse_folder(_OUTPUT, "make_tasks"))


def passage(tokens: TokenSequence, tokenizer: Tokenizer) -> list[str] | None:
    """A window's whole words with the whitespace before each but the first; None if too few."""
    words = re.findall(r"\s*\S+", tokenizer.decode(tokens))[1:-1]
    return [words[0].lstrip(), *words[1:]] if len(words) >= _FEWEST_WORDS else None


def documents(passages: list[list[str]], seed: int = 0) -> list[dict]:
    """The tasks' documents: passages split at two thirds and at the last word; other endings."""
    random = np.random.default_rng(seed)
    rows = []
    for number, words in enumerate(passages):
        middle = len(words) * 2 // 3
        sampled = random.choice(len(passages) - 1, _CHOICES - 1, replace=False)
        others = [passages[other + (other >= number)] for other in sampled]
        endings = ["".join(other[len(other) * 2 // 3 :]) for other in others]
        label = int(random.integers(_CHOICES))
        endings.insert(label, "".join(words[middle:]))
        rows.append(
            {
                "beginning": "".join(words[:middle]),
                "endings": endings,
                "label": label,
                "before": "".join(words[:-1]),
                "last": words[-1],
            }
        )
    return rows


def make_tasks(workdir: AnyPath, output: AnyPath) -> None:
    """Writes tasks made from a run's validation text to `output`.

    Raises:
      InputError: if the text is too short.
    """
    data = read_config(workdir).data
    corpus = load_corpus(workdir)
    (windows, *_) = eval_examples(data, corpus)
    chosen = np.random.default_rng(0).permutation(len(windows))[:_PASSAGES]
    rows = (windows[int(number)]["inputs"] for number in sorted(chosen))
    passages = [words for row in rows if (words := passage(row, corpus.tokenizer))]
    if len(passages) < _CHOICES:
        raise InputError(
            f"workdir {workdir}: only {len(passages)} windows of its validation text have "
            f"{_FEWEST_WORDS} words; use a longer text or a larger data.sequence_length"
        )
    lines = [json.dumps(document) for document in documents(passages)]
    write_whole(output / "documents.jsonl", ("\n".join(lines) + "\n").encode())
    for name, fields in _TASKS.items():
        source = (
            f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs: "
            f"{json.dumps({'data_files': {'test': str(output / 'documents.jsonl')}})}\n"
        )
        write_whole(output / f"{name}.yaml", (source + fields.lstrip()).encode())
    log(f"{len(passages)} passages in {output}: {', '.join(_TASKS)}")


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
