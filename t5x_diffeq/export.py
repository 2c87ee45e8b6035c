"""Exports a trained run to a Hugging Face folder: --workdir=DIR --output=OUT [--num_steps=24].

A model of Lie-Trotter steps (every baseline) becomes a LlamaForCausalLM or GPT2LMHeadModel, one of
Euler steps brings its own PyTorch file: AutoModelForCausalLM.from_pretrained(OUT,
trust_remote_code=True). Needs safetensors: pip install -e '.[export]'.
"""

from absl import flags

from t5x_diffeq import command_line
from t5x_diffeq.config_keys import INT32, STEPS
from t5x_diffeq.data.tokenizer import load_tokenizer
from t5x_diffeq.errors import InputError
from t5x_diffeq.exchange.folder import local, need_safetensors
from t5x_diffeq.exchange.save_pretrained import save_pretrained
from t5x_diffeq.report import count, say, table
from t5x_diffeq.training.metrics import read_metrics
from t5x_diffeq.training.run import load_run
from t5x_diffeq.training.workdir import read_config

FLAGS = flags.FlagValues()
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=FLAGS)
OUTPUT = flags.DEFINE_string("output", None, "Folder to make; new, or empty.", flag_values=FLAGS)
NUM_STEPS = flags.DEFINE_integer(
    "num_steps", None, "Number of steps, or layers; the trained one.", 1, STEPS, flag_values=FLAGS
)
PEFT = flags.DEFINE_bool(
    "peft", False, "Adapters apart from their base, in PEFT's form in adapter/.", flag_values=FLAGS
)
CHECKPOINT = flags.DEFINE_integer(
    "checkpoint", None, "Step of the checkpoint; the newest.", 0, INT32, flag_values=FLAGS
)


def main() -> None:
    """The verb."""
    workdir = command_line.folder(WORKDIR, "export")
    output = local(command_line.folder(OUTPUT, "export"), "output")
    need_safetensors("export")
    as_run = read_config(workdir)
    tokenizer = load_tokenizer(workdir / "tokenizer")  # of its data nothing else is needed
    if tokenizer is None:
        raise InputError(f"workdir {workdir} has lost its tokenizer/; restore it")
    run = load_run(
        workdir,
        tokenizer.vocab_size,
        batch_size=1,
        num_steps=NUM_STEPS.value,
        checkpoint=CHECKPOINT.value,
    )
    with run.setup.context():
        told = save_pretrained(run, as_run, tokenizer, read_metrics(workdir), output, PEFT.value)
    say(*told["notes"])
    facts = {
        "checkpoint": str(run.step),
        "class": told["class"],
        "layers": str(run.setup.model.config.num_steps),
        "parameters": count(told["parameters"]),
    }
    table(f"exported to {output}", facts)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
