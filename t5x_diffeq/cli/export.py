"""Exports a trained run to a Hugging Face folder: --workdir=DIR --output=OUT [--num_steps=24].

A model with Lie-Trotter steps (every baseline) becomes the equivalent class of transformers if
there is one: Llama, Mistral, Qwen2, Qwen3, OLMo 2, Gemma or GPT-2. Any other model of Euler or
Lie-Trotter steps comes with its own PyTorch file, which
AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True) loads. With --form=hypernetwork
from_pretrained also takes num_steps=24 or any other number, for models such as the variant :smooth.
Needs safetensors: pip install -e '.[export]'.
"""

from t5x_diffeq.cli import flag_values
from t5x_diffeq.cli.verb_flags import VerbFlags
from t5x_diffeq.system.console import Progress, format_count, log, print_table

_LAYERS = "layers"
FLAGS = VerbFlags(__name__)
_WORKDIR = FLAGS.define_workdir()
_OUTPUT = FLAGS.define_text("output", "Folder to write; it must be new or empty.")
_NUM_STEPS = FLAGS.define_num_steps()
_PEFT = FLAGS.define_switch(
    "peft", "Write the adapters separately, in the format of PEFT, to OUT/adapter."
)
_FORM = FLAGS.define_choice(
    "form",
    "Form of the weights: layers, or W(t) as a polynomial of t for any number of steps.",
    [_LAYERS, "hypernetwork"],
)
_CHECKPOINT = FLAGS.define_checkpoint()
_AVERAGES = FLAGS.define_averages()


def main() -> None:
    """Runs the verb."""
    workdir = flag_values.parse_folder(_WORKDIR, "export")
    target = flag_values.parse_folder(_OUTPUT, "export")

    from t5x_diffeq.checkpoints.workdir import read_config
    from t5x_diffeq.data.tokenizer_folder import tokenizer_of_run  # importing JAX takes seconds
    from t5x_diffeq.hf.folder import local_path, need_packages
    from t5x_diffeq.hf.save_pretrained import save_pretrained
    from t5x_diffeq.training.load import load_run
    from t5x_diffeq.training.tracking.jsonl import read_metrics

    output = local_path(target, "output")
    need_packages("export")
    as_run = read_config(workdir)
    tokenizer = tokenizer_of_run(workdir)
    run = load_run(
        workdir,
        tokenizer.vocab_size,
        batch_size=1,
        checkpoint=_CHECKPOINT.value,
        averages=_AVERAGES.value,
        grids=[(_NUM_STEPS.value, None)],
        methods=("pytorch_form",),
    ).at_depth(_NUM_STEPS.value)
    evaluations = list(read_metrics(workdir, "eval/loss"))
    with run.placed.context(), Progress("writing the folder"):
        summary = save_pretrained(
            run, as_run, tokenizer, evaluations, output, _PEFT.value, _FORM.value
        )
    log(*summary.notes)
    facts = {
        "checkpoint": str(run.step),
        "class": summary.model_class,
        "layers" if _FORM.value == _LAYERS else "solver steps": str(
            run.placed.model.config.num_steps
        ),
        "parameters": format_count(summary.parameters),
        "logits": summary.logits,
    }
    print_table(f"exported to {output}", facts)
