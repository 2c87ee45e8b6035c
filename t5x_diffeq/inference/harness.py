"""Tasks of lm-evaluation-harness, run on a trained run."""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple

import jax
import numpy as np
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.inference.harness_model import DiffEqLM
from t5x_diffeq.system.console import align, log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, write_whole
from t5x_diffeq.training.load import Run

_PAPER = (  # tables 4 and 5
    *("arc_challenge", "arc_easy", "hellaswag", "lambada_openai", "lambada_standard", "logiqa"),
    *("mmlu", "piqa", "sciq", "winogrande", "wsc273"),
)
_BOOTSTRAP = 1000  # resamples for the standard errors that have no formula


class Tasks(NamedTuple):
    """The tasks to run."""

    names: list[str]  # names of tasks and of groups of tasks
    shots: int | None  # examples in each context; None for the task's own number
    limit: int | None  # only the first `limit` documents of each task; None for all
    manager: TaskManager
    methods: tuple[str, ...]  # of a block: those for generation, if a task generates


def task_names(requested: Sequence[str]) -> list[str]:
    """The names without repetitions, and with `paper` replaced by the paper's eleven tasks."""
    names = [name for each in requested for name in (_PAPER if each == "paper" else (each,))]
    return list(dict.fromkeys(names))


def load_tasks(
    requested: Sequence[str], shots: int | None, include_path: str | None, limit: int | None = None
) -> Tasks:
    """Finds and loads the tasks once, so that errors are reported before a model is loaded.

    Args:
      requested: names, which may include `paper`.
      include_path: folder of the user's task files.

    Raises:
      InputError: if there is no task of a name, or its data can't be loaded.
    """
    names = task_names(requested)
    if include_path and not os.path.isdir(include_path):
        raise InputError(
            f"include_path={include_path} is not a folder; name a folder of task files"
        )
    with _silence_harness():
        manager = manager_of(names, include_path)
        generates = [_load_task(name, manager) for name in names]
    return Tasks(names, shots, limit, manager, ("extend", "empty_cache") if any(generates) else ())


def manager_of(names: list[str], include_path: str | None) -> TaskManager:
    """The manager of the user's task files if they have all names; else of the harness's, too."""
    if include_path:
        included = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(included.all_subtasks):
            return included
    return TaskManager(include_path=include_path)


def _load_task(name: str, manager: TaskManager) -> bool:
    """Whether the task, or one of the group, generates text."""
    if name not in manager.all_tasks:
        near = get_close_matches(name, manager.all_tasks, n=1)
        hint = f"did you mean {near[0]}?" if near else "name its folder with --include_path"
        raise InputError(f"--tasks: there is no task {name!r}; {hint}")
    try:
        tasks = manager.load([name])["tasks"].values()
    except Exception as error:  # from the network, the data or the task's own code
        message = " ".join(str(error).split())[:200]
        raise InputError(
            f"--tasks: {name} can't be loaded ({type(error).__name__}: {message}); its data is "
            "what its task file names, on the Hugging Face hub or here"
        ) from error
    return any(task.OUTPUT_TYPE == "generate_until" for task in tasks)


def evaluate_run_on_tasks(
    run: Run, tokenizer: Tokenizer, batch_size: int, tasks: Tasks, folder: AnyPath
) -> dict[str, float | int | str]:
    """Runs the tasks, prints the harness's table, and writes its JSON to the folder.

    For paired tests, the JSON also holds each document's accuracy under `documents`, by task, in
    the order of the task's documents.

    Returns:
      The grid, and every number of the results.
    """
    model = run.placed.model.config
    grid: dict[str, float | int | str] = {
        "step": run.step,
        "num_steps": model.num_steps,
        "scheme": model.scheme,
    }
    results = _run_tasks(DiffEqLM(run.placed, run.params, tokenizer, batch_size, grid), tasks)
    if jax.process_index() == 0:
        name = "-".join(map(str, (*grid.values(), time.strftime("%Y%m%dT%H%M%S"))))
        path = folder / f"{name}.json"
        write_whole(path, json.dumps(results, indent=2).encode())
        log(f"in {path}")
    return grid | _flatten_results(results)


def _run_tasks(lm: DiffEqLM, tasks: Tasks) -> dict:
    """The harness's results, with each document's accuracy in place of its sample; prints them."""
    with _silence_harness():
        results = simple_evaluate(
            lm,
            tasks=tasks.names,
            num_fewshot=tasks.shots,
            task_manager=tasks.manager,
            limit=tasks.limit,
            bootstrap_iters=_BOOTSTRAP,
            log_samples=True,
        )
    results["documents"] = _accuracies(results.pop("samples", None) or {})
    results = json.loads(json.dumps(results, default=handle_non_serializable))
    for kind in ("results", "groups"):
        if results.get(kind):
            log(*_format_results(results, kind))
    return results


def _accuracies(samples: dict[str, list[dict]]) -> dict[str, list[float]]:
    """The accuracy of every document, by task, for the tasks that measure accuracy."""
    return {
        task: [float(each["acc"]) for each in sorted(documents, key=lambda each: each["doc_id"])]
        for task, documents in samples.items()
        if all("acc" in each for each in documents)
    }


@contextlib.contextmanager
def _silence_harness() -> Iterator[None]:
    """Makes the harness print to standard error, on process 0 only, and fork no processes."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # forking a multithreaded process may hang
    with contextlib.ExitStack() as stack:
        if jax.process_index():
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _format_number(value: object) -> str:
    """The text of a table cell; empty for None."""
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def _format_results(results: dict, kind: str) -> list[str]:
    """A line for each number of the tasks ("results") or of the groups ("groups")."""
    lines = [["task" if kind == "results" else "group", "filter", "shots", "metric", "value", "±"]]
    for task, metrics in results[kind].items():
        name, shots = str(metrics.get("alias", task)), str(results["n-shot"].get(task, ""))
        for key, value in sorted(metrics.items()):
            metric, _, kept = key.partition(",")
            if not kept or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{kept}")
            lines.append([name, kept, shots, metric, _format_number(value), _format_number(error)])
            name = shots = ""  # shown once per task
    return align(lines, left=(0, 1, 3))


def _flatten_results(results: dict) -> dict[str, float]:
    """Every number of the results: `tasks/piqa/acc`, `tasks/piqa/acc_stderr` and so on."""
    values = {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if kind and isinstance(value, int | float) and np.isfinite(value):
                label = metric if kind == "none" else f"{metric}/{kind}"
                values[f"tasks/{task}/{label}"] = value
    return values
