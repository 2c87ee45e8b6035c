"""The README of an exported model: what it is, and the run's facts."""

import json

from t5x_diffeq.models.config import ModelConfig
from t5x_diffeq.runs.load import Run
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.console import format_count

_SECTIONS = ("model", "train", "optimizer")  # data and mesh are of one machine


def model_card(run: Run, as_run: Config, reports: list[dict], plain: bool, notes: list[str]) -> str:
    """Markdown, with the library's front matter.

    Args:
      run: the run, on the grid that was exported.
      as_run: the config in the workdir.
      reports: the run's metrics, oldest first.
      plain: whether transformers' own classes load the model.
      notes: what else a user must know.
    """
    model = run.placed.model.config
    how = "" if plain else ", trust_remote_code=True"
    facts = {
        "checkpoint": run.step,
        **_training_facts(run.step, as_run),
        **_evaluation(reports, run.step),
    }
    trained_steps = as_run.model.num_steps
    if model.num_steps != trained_steps:
        notes = [f"Trained with {trained_steps} steps, exported with {model.num_steps}.", *notes]
    config = {section: as_run.as_json()[section] for section in _SECTIONS}
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [t5x_diffeq, neural-ode]",
            "---",
            "",
            f"# {_describe_model(model)}",
            "",
            "Exported by t5x_diffeq.",
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"model = AutoModelForCausalLM.from_pretrained(FOLDER{how})",
            f"tokenizer = AutoTokenizer.from_pretrained(FOLDER{how})",
            "```",
            "",
            *(f"- {note}" for note in notes),
            *([""] if notes else []),
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in facts.items()),
            "",
            "Config:",
            "",
            "```json",
            json.dumps(config, indent=2),
            "```",
            "",
        ]
    )


def _describe_model(c: ModelConfig) -> str:
    """The model in words: `llama, 12 steps of euler, time_dependent weights`."""
    return (
        f"{c.architecture}, {c.num_steps} steps of {c.scheme} with step size {c.step_size}, "
        f"{c.weights} weights, width {c.embed_dim}"
    )


def _training_facts(step: int, as_run: Config) -> dict[str, str]:
    train, data = as_run.train, as_run.data
    return {
        "optimizer steps": f"{step} of {train.total_steps}",
        "tokens seen": format_count(step * train.batch_size * data.sequence_length),
        "data": f"{data.source}, sequences of {data.sequence_length} tokens",
    }


def _evaluation(reports: list[dict], step: int) -> dict[str, str]:
    last = [each for each in reports if "eval/loss" in each and each["step"] <= step][-1:]
    return {
        f"validation at step {each['step']}": f"loss {each['eval/loss']:.4f} nats per token, "
        f"perplexity {each['eval/perplexity']:.2f}"
        for each in last
    }
