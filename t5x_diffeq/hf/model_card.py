"""The README of an exported model: what it is, and the run's facts."""

import json

from t5x_diffeq.config.config import Config
from t5x_diffeq.system.console import format_count
from t5x_diffeq.training.load import Run

_SECTIONS = ("model", "train", "optimizer")  # data and mesh are of one machine
_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [t5x_diffeq, neural-ode]
---

# {title}

Exported by t5x_diffeq.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER{how})
tokenizer = AutoTokenizer.from_pretrained(FOLDER{how})
```

{notes}
| | |
|---|---|
{facts}

Config:

```json
{config}
```
"""


def model_card(run: Run, as_run: Config, reports: list[dict], plain: bool, notes: list[str]) -> str:
    """Markdown, with the library's front matter.

    Args:
      run: the run, on the grid that was exported.
      as_run: the config in the workdir.
      reports: the run's metrics, oldest first.
      plain: whether transformers' own classes load the model.
      notes: what else a user must know.
    """
    model, train, data = run.placed.model.config, as_run.train, as_run.data
    facts = {
        "checkpoint": run.step,
        "optimizer steps": f"{run.step} of {train.total_steps}",
        "tokens seen": format_count(run.step * train.batch_size * data.sequence_length),
        "data": f"{data.source}, sequences of {data.sequence_length} tokens",
    }
    evaluated = [each for each in reports if "eval/loss" in each and each["step"] <= run.step]
    for last in evaluated[-1:]:
        facts[f"validation at step {last['step']}"] = (
            f"loss {last['eval/loss']:.4f} nats per token, perplexity {last['eval/perplexity']:.2f}"
        )
    trained_steps = as_run.model.num_steps
    if model.num_steps != trained_steps:
        notes = [f"Trained with {trained_steps} steps, exported with {model.num_steps}.", *notes]
    return _CARD.format(
        title=f"{model.architecture}, {model.num_steps} steps of {model.scheme} with step size "
        f"{model.step_size}, {model.weights} weights, width {model.embed_dim}",
        how="" if plain else ", trust_remote_code=True",
        notes="".join(f"- {note}\n" for note in notes),
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        config=json.dumps({name: as_run.as_json()[name] for name in _SECTIONS}, indent=2),
    )
