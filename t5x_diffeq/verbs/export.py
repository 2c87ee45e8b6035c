"""A run as a Hugging Face folder."""

from t5x_diffeq.data.tokenizer import load_tokenizer
from t5x_diffeq.exchange.folder import local_path, need_packages
from t5x_diffeq.exchange.hypernetwork_form import LAYERS
from t5x_diffeq.exchange.save_pretrained import save_pretrained
from t5x_diffeq.runs.load import load_run
from t5x_diffeq.runs.workdir import read_config
from t5x_diffeq.runtime.console import Progress, format_count, print_table, say
from t5x_diffeq.runtime.errors import InputError
from t5x_diffeq.runtime.files import AnyPath
from t5x_diffeq.tracking.jsonl import read_metrics


def export(
    workdir: AnyPath,
    to: AnyPath,
    num_steps: int | None,
    checkpoint: int | str | None,
    peft: bool,
    averages: bool = False,
    form: str = LAYERS,
) -> None:
    """Writes the folder and prints what it holds.

    Args:
      workdir: the run's workdir.
      to: the folder, new or empty.
      num_steps: number of solver steps; None for the trained one.
      checkpoint: optimizer step of the checkpoint, or "best"; None for the newest.
      peft: whether adapters are written separately from their base.
      averages: take the moving averages of the parameters.
      form: "layers" or "hypernetwork".

    Raises:
      InputError: if the run can't be exported, or the folder is invalid.
    """
    output = local_path(to, "output")
    need_packages("export")
    as_run = read_config(workdir)
    tokenizer = load_tokenizer(workdir / "tokenizer")  # nothing else of its data is needed
    if tokenizer is None:
        raise InputError(f"workdir {workdir} has lost its tokenizer/; restore it")
    run = load_run(
        workdir,
        tokenizer.vocab_size,
        batch_size=1,
        checkpoint=checkpoint,
        averages=averages,
        grids=[(num_steps, None)],
        methods=("pytorch_form",),
    )
    run = run.at_depth(num_steps)
    with run.placed.context(), Progress("writing the folder"):
        summary = save_pretrained(run, as_run, tokenizer, read_metrics(workdir), output, peft, form)
    say(*summary.notes)
    facts = {
        "checkpoint": str(run.step),
        "class": summary.model_class,
        "layers" if form == LAYERS else "solver steps": str(run.placed.model.config.num_steps),
        "parameters": format_count(summary.parameters),
        "logits": summary.logits,
    }
    print_table(f"exported to {output}", facts)
