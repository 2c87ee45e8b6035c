"""Evaluates a run whose kernels are rounded to integers: --workdir=DIR --bits=8 --bits=4.

Prints the validation loss, the loss with rounded weights W(t), and that with rounded parameters, as
JSON.
"""

import json

from absl import flags

from t5x_diffeq.runtime import command_line
from t5x_diffeq.runtime.run_flags import VerbFlags

FLAGS = VerbFlags(__package__)
_WORKDIR = FLAGS.define_workdir()
_CHECKPOINT = FLAGS.define_checkpoint()
_NUM_STEPS = FLAGS.define_num_steps()
_BITS = flags.DEFINE_multi_integer(
    "bits", [8, 4], "Bits of an integer; may be repeated.", 2, 8, flag_values=FLAGS
)
_BATCH_SIZE = FLAGS.define_integer("batch_size", "Sequences per batch.", 32, 1)
_EVAL_BATCHES = FLAGS.define_integer(
    "eval_batches",
    "Evaluate only this many batches. [default: the whole validation split]",
    None,
    1,
)


def main() -> None:
    """The command."""
    workdir = command_line.parse_folder(_WORKDIR, "quantization")

    # JAX and the rest take seconds.
    from t5x_diffeq.contrib.quantization.rounding import evaluate_rounded
    from t5x_diffeq.data.corpus import load_corpus
    from t5x_diffeq.runs.load import load_run

    corpus = load_corpus(workdir)
    run = load_run(
        workdir,
        corpus.tokenizer.vocab_size,
        batch_size=1,
        checkpoint=_CHECKPOINT.value,
        grids=[(_NUM_STEPS.value, None)],
    ).at_depth(_NUM_STEPS.value)
    losses = evaluate_rounded(run, corpus, _BITS.value, _BATCH_SIZE.value, _EVAL_BATCHES.value)
    print(json.dumps(losses))


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
