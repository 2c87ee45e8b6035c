"""Exports a trained run to a Hugging Face folder: --workdir=DIR --output=OUT [--num_steps=24].

A model with Lie-Trotter steps (every baseline) becomes the equivalent class of transformers if
there is one: Llama, Mistral, Qwen2, Qwen3, OLMo 2, Gemma or GPT-2. Any other model of Euler or
Lie-Trotter steps comes with its own PyTorch file, which
AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True) loads. With --form=hypernetwork
from_pretrained also takes num_steps=24 or any other number, for models such as the variant :smooth.
Needs safetensors: pip install 't5x_diffeq[export]'.
"""

from absl import flags

from t5x_diffeq.runtime import command_line, run_flags

FLAGS = flags.FlagValues()
_WORKDIR = run_flags.define_workdir(FLAGS)
_OUTPUT = flags.DEFINE_string(
    "output", None, "Folder to write; it must be new or empty.", flag_values=FLAGS
)
_NUM_STEPS = run_flags.define_num_steps(FLAGS)
_PEFT = flags.DEFINE_bool(
    "peft",
    False,
    "Write the adapters separately, in the format of PEFT, to OUT/adapter.",
    flag_values=FLAGS,
)
_FORM = flags.DEFINE_enum(
    "form",
    "layers",
    ["layers", "hypernetwork"],
    "Form of the weights: layers, or W(t) as a polynomial of t for any number of steps.",
    flag_values=FLAGS,
)
_CHECKPOINT = run_flags.define_checkpoint(FLAGS)
_AVERAGES = run_flags.define_averages(FLAGS)


def main() -> None:
    """Runs the verb."""
    workdir = command_line.parse_folder(_WORKDIR, "export")
    output = command_line.parse_folder(_OUTPUT, "export")

    from t5x_diffeq.verbs.export import export  # importing JAX takes seconds

    export(
        workdir,
        output,
        _NUM_STEPS.value,
        _CHECKPOINT.value,
        _PEFT.value,
        _AVERAGES.value,
        _FORM.value,
    )


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
