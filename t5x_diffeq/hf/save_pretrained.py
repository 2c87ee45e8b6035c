"""A trained run as a Hugging Face folder."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from t5x_diffeq.config.config import Config
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.data.tokenizer_folder import GENERATION_FILE
from t5x_diffeq.hf import hypernetwork_form
from t5x_diffeq.hf.check_folder import compare_logits
from t5x_diffeq.hf.config_json import DIFFEQ_FORM, diffeq_config, plain_config
from t5x_diffeq.hf.families import family_of
from t5x_diffeq.hf.folder import new_folder, write_tensors
from t5x_diffeq.hf.layouts import check_names, diffeq_layout, tensors_of
from t5x_diffeq.hf.to_peft import ADAPTER_FOLDER, write_adapters
from t5x_diffeq.hf.tokenizer_files import write_tokenizer
from t5x_diffeq.model.config import ModelConfig
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.model.layers.array_types import Weights
from t5x_diffeq.model.layers.linear import ADAPTERS
from t5x_diffeq.model.ode.solvers import SCHEMES, find_scheme
from t5x_diffeq.model.sub_fields import declared_leaves, make_block, need_methods
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


def _export_weights(model: LanguageModel, params: dict, merged: bool = True) -> Weights:
    """The weights of the grid in float32; those that write to the residual stream include dt.

    Adapters are merged into the kernels, or left out.
    """
    exact = LanguageModel(model.config.in_float32())
    method = "merged_weights" if merged else "weights"
    with jax.default_matmul_precision("highest"):
        weights = jax.jit(lambda params: exact.apply({"params": params}, method=method))(params)
    weights = {name: leaves for name, leaves in weights.items() if name != ADAPTERS}
    declared, dt = declared_leaves(model.config), model.config.dt
    return unflatten_dict(
        {
            path: leaf * dt if declared[path].writes_residual else leaf
            for path, leaf in flatten_dict(weights).items()
        }
    )


def save_pretrained(
    run: Run,
    as_run: Config,
    tokenizer: Tokenizer,
    evaluations: list[dict],
    output: Path,
    peft: bool = False,
    kept_form: str = hypernetwork_form.LAYERS,
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
    keeps_hypernetwork = kept_form == hypernetwork_form.HYPERNETWORK
    if keeps_hypernetwork:
        hypernetwork_form.check_polynomial(config)
        plain, form = None, hypernetwork_form.pytorch_form(config)
    else:
        need_methods(config, ("pytorch_form",))
        plain = family_of(config)
        form = make_block(config).pytorch_form() if config.block else DIFFEQ_FORM
    layout = plain[1].layout if plain else diffeq_layout(config)
    check_names(layout, config, run.params)
    with new_folder(output, "output") as folder:
        weights = (
            hypernetwork_form.polynomial_weights(run.placed.model, run.params)
            if keeps_hypernetwork
            else _export_weights(run.placed.model, run.params, merged=not peft)
        )
        params = run.params
        if config.architecture == "gpt":  # no class of transformers has a factor on positions
            table = params["position_embedding"]["table"] * config.position_scale
            params = {**params, "position_embedding": {"table": table}}
        parameters = write_tensors(folder, tensors_of(layout, config, params, weights))
        if peft:
            write_adapters(layout, config, run.params, folder / ADAPTER_FOLDER, str(output))
        ends = tokenizer.border
        written = plain_config(config, *plain, ends) if plain else diffeq_config(config, form, ends)
        imported = tokenizer.imported
        _write_json(folder / "config.json", {**written, **imported.get("config.json", {})})
        ids = {"bos_token_id": ends.opener, "eos_token_id": ends.end}
        _write_json(folder / GENERATION_FILE, {**ids, **imported.get(GENERATION_FILE, {})})
        lacking = write_tokenizer(tokenizer, folder, config.max_length)
        if not plain:
            for file in {DIFFEQ_FORM.modeling, form.modeling}:
                shutil.copyfile(file, folder / file.name)
        notes = [lacking] if lacking else []
        if keeps_hypernetwork:
            notes.append(
                "`from_pretrained(..., num_steps=24)` sets the number of solver steps, which is "
                f"{config.num_steps} if it isn't given."
            )
        if peft:
            notes.append(f"The adapters are PEFT's, in `{ADAPTER_FOLDER}/`, not merged into it.")
        card = _model_card(run, as_run, evaluations, plain is not None, notes)
        (folder / "README.md").write_text(card, "utf-8")
        (model_class,) = written["architectures"]
        adapter = folder / ADAPTER_FOLDER if peft else None
        compared = compare_logits(folder, model_class, config, run.params, adapter)
    return Summary(model_class, parameters, compared, notes)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


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


def _model_card(
    run: Run, as_run: Config, evaluations: list[dict], plain: bool, notes: list[str]
) -> str:
    """Markdown, with front matter; `plain`: whether transformers' own classes load the model."""
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
        how="" if plain else ", trust_remote_code=True",
        notes="".join(f"- {note}\n" for note in notes),
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        config=json.dumps({name: as_run.as_json()[name] for name in _SECTIONS}, indent=2),
    )
