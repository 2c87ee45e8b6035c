"""A trained run as a Hugging Face folder."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.data.tokenizer_folder import GENERATION_FILE
from t5x_diffeq.hf.check_folder import compare_logits
from t5x_diffeq.hf.families import family_of
from t5x_diffeq.hf.folder import new_folder, write_tensors
from t5x_diffeq.hf.forms import LayersForm, LibraryForm
from t5x_diffeq.hf.hypernetwork_form import HYPERNETWORK, LAYERS, PolynomialForm
from t5x_diffeq.hf.layouts import check_names, tensors_of
from t5x_diffeq.hf.to_peft import ADAPTER_FOLDER, write_adapters
from t5x_diffeq.hf.tokenizer_files import write_tokenizer
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.ode.solvers import SCHEMES, find_scheme
from t5x_diffeq.system.console import format_count
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.training.load import Run


class Summary(NamedTuple):
    """The facts of a folder that the verb prints."""

    model_class: str  # the library's class that reads it
    parameters: int  # number of parameters
    logits: str  # how the folder's logits compare with the run's, in words
    notes: list[str]  # what a user must know


def check_form(config: ModelConfig) -> None:
    """Checks that a step has the form of a transformer's layer (else: InputError)."""
    if find_scheme(config.scheme).layer is None:
        exported = (name for name, scheme in SCHEMES.items() if scheme.layer)
        raise InputError(
            f"model.scheme={config.scheme} can't be exported, because its step isn't a layer that "
            f"adds attention and MLP to the state once; {' and '.join(exported)} can"
        )


def save_pretrained(
    run: Run,
    as_run: Config,
    tokenizer: Tokenizer,
    evaluations: list[dict],
    output: Path,
    peft: bool = False,
    kept_form: str = LAYERS,
) -> Summary:
    """Writes the folder, whole or not at all; returns a summary of it.

    Args:
      run: the run, on the grid to export.
      as_run: the config in the workdir.
      evaluations: the reports of the run's evaluations, oldest first.
      output: the folder, new or empty.
      peft: write the adapters in PEFT's form to a subfolder instead of merging them.
      kept_form: "layers" of the grid, or "hypernetwork" (see `hypernetwork_form`).

    Raises:
      InputError: if the model can't be exported, or the folder is invalid.
      RunError: if the folder can't be written, or its model differs from the run.
    """
    config = run.placed.model.config
    check_form(config)
    if peft and not config.adapter_rank:
        raise InputError(
            "--peft needs a run with adapters, of `finetune --config=configs/finetune.py:lora`, "
            "and this one has none; leave it out"
        )
    form = _form_of(config, kept_form)
    check_names(form.layout, config, run.params)
    with new_folder(output, "output") as folder:
        weights = form.weights(run.placed.model, run.params, merged=not peft)
        params = run.params
        if config.architecture == "gpt":  # no class of transformers has a factor on positions
            table = params["position_embedding"]["table"] * config.position_scale
            params = {**params, "position_embedding": {"table": table}}
        parameters = write_tensors(folder, tensors_of(form.layout, config, params, weights))
        if peft:
            write_adapters(form.layout, config, run.params, folder / ADAPTER_FOLDER, str(output))
        ends = tokenizer.border
        written, imported = form.config_json(ends), tokenizer.imported
        _write_json(folder / "config.json", {**written, **imported.get("config.json", {})})
        ids = {"bos_token_id": ends.opener, "eos_token_id": ends.end}
        _write_json(folder / GENERATION_FILE, {**ids, **imported.get(GENERATION_FILE, {})})
        lacking = write_tokenizer(tokenizer, folder, config.max_length)
        for file in form.files:
            shutil.copyfile(file, folder / file.name)
        notes = [*([lacking] if lacking else []), *form.notes]
        if peft:
            notes.append(f"The adapters are PEFT's, in `{ADAPTER_FOLDER}/`, not merged into it.")
        card = _model_card(run, as_run, evaluations, form.is_own, notes)
        (folder / "README.md").write_text(card, "utf-8")
        (model_class,) = written["architectures"]
        adapter = folder / ADAPTER_FOLDER if peft else None
        # While the folder has a temporary name: with other logits it never gets its own.
        compared = compare_logits(folder, model_class, config, run.params, adapter)
    return Summary(model_class, parameters, compared, notes)


def _form_of(config: ModelConfig, kept_form: str) -> LibraryForm | LayersForm:
    """The form of a model: a class of transformers, if there is one and W(t) isn't to be kept."""
    if kept_form == HYPERNETWORK:
        return PolynomialForm(config)
    family = family_of(config)
    return LibraryForm(config, *family) if family else LayersForm(config)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


_SECTIONS = ("model", "train", "optimizer")  # data and mesh describe one machine
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


def _model_card(
    run: Run, as_run: Config, evaluations: list[dict], is_own: bool, notes: list[str]
) -> str:
    """Markdown, with front matter; `is_own`: whether the model comes with code of its own."""
    model, train, data = run.placed.model.config, as_run.train, as_run.data
    facts = {
        "checkpoint": run.step,
        "optimizer steps": f"{run.step} of {train.total_steps}",
        "tokens seen": format_count(run.step * train.batch_size * data.sequence_length),
        "data": f"{data.source}, sequences of {data.sequence_length} tokens",
    }
    evaluated = [each for each in evaluations if each["step"] <= run.step]
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
        how=", trust_remote_code=True" if is_own else "",
        notes="".join(f"- {note}\n" for note in notes),
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        config=json.dumps({name: as_run.as_json()[name] for name in _SECTIONS}, indent=2),
    )
