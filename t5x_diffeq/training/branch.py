"""A branch: a run that goes on from a checkpoint of another run, in its own workdir.

It has that run's parameters, optimizer state and position in the data, and its own schedule. So
several cooldowns can start from one stable checkpoint. The workdir begins as a copy of the other
workdir as it was at the checkpoint, and is then resumed like any run. The tokens aren't copied.
`branch.json` is written first and `config.json` last, so an interrupted copy is recognised.
"""

import json
from collections.abc import Mapping

from t5x_diffeq.checkpoints.checkpoint_folder import read_facts, steps_in
from t5x_diffeq.checkpoints.identity import RUN_ID, new_id
from t5x_diffeq.checkpoints.restoring import check_continues, check_whole, find_step
from t5x_diffeq.checkpoints.workdir import differing_keys, read_config, save_config
from t5x_diffeq.config.config import CONFIG_FILE, KEYS, Config, is_run
from t5x_diffeq.data.corpus import link_corpus
from t5x_diffeq.system import files
from t5x_diffeq.system.console import Progress, log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.foreign_files import read_inside
from t5x_diffeq.training.progress import log_new_rate
from t5x_diffeq.training.tracking.jsonl import copy_metrics

FILE = "branch.json"


def branch_off(
    workdir: files.AnyPath,
    source: files.AnyPath,
    step: int | None,
    config: Config | None,
    values: Mapping[str, object],
    first: bool,
) -> Config:
    """The config of a branch, whose workdir is made if it is new.

    Args:
      workdir: its workdir.
      source: the workdir of the run that it branches off.
      step: the step of the checkpoint; None: the newest.
      config: the branch's config; None: the run's, or on resuming the branch's own.
      values: values by dotted key for `config=None`.
      first: whether this process makes the workdir.

    Raises:
      InputError: if the workdir is another run's, or the config changes what a branch must keep.
    """
    if is_run(workdir):
        began = _check_origin(workdir, source, step)
        branch_config = read_config(workdir).with_values(values)
        return branch_config if config is None else _with_cooldown(config, began)
    original = read_config(source, named="--branch_from=")
    step = find_step(source, step)
    check_continues(source, step)
    config = config or original.with_values(values)
    config = _with_cooldown(config, step)
    _check_config(original, config, source)
    if first:
        with Progress(f"copying checkpoint {step} of {source}"):
            _make_workdir(config, workdir, source, step)
        changed = differing_keys(original, config)
        listed = ", ".join(f"{key}={new!r}" for key, (_, new) in changed.items())
        log(f"branches off {source} at its step {step}, with {listed or 'the same config'}")
        log_new_rate(source, config, step)
    return config


def _with_cooldown(config: Config, step: int) -> Config:
    """The config; if the cooldown has no number of steps, it takes the whole branch."""
    optimizer, left = config.optimizer, config.train.total_steps - step
    if left < 1:
        raise InputError(
            f"train.total_steps={config.train.total_steps} is not more than {step}, the step of "
            "the checkpoint that the run branches off; it counts from the start of that run"
        )
    if optimizer.schedule != "wsd" or optimizer.cooldown_steps is not None:
        return config
    return config.with_values({"optimizer.cooldown_steps": left})


def _check_origin(workdir: files.AnyPath, source: files.AnyPath, step: int | None) -> int:
    """Checks that the workdir belongs to this branch; returns the step at which it began."""
    path = workdir / FILE
    origin = files.parse_json(read_inside(path)) if path.exists() else {}
    if origin.get("from") != str(files.absolute_path(source)) or step not in (None, origin["step"]):
        owner = f"a branch of {origin['from']} at step {origin['step']}" if origin else "no branch"
        raise InputError(
            f"--branch_from={source}: workdir {workdir} belongs to {owner}; choose a new --workdir"
        )
    return origin["step"]


def _check_config(original: Config, config: Config, source: files.AnyPath) -> None:
    """Checks that a run of the config `original` can go on with `config`."""
    if original.init_from:
        raise InputError(
            f"--branch_from={source}: that run was tuned from {original.init_from}; `finetune` "
            "starts from a run's weights (--config.init_from)"
        )
    refused = [
        f"{key} was {old!r}, is {new!r}"
        for key, (old, new) in differing_keys(original, config).items()
        if not KEYS[key].branch
    ]
    if refused:
        raise InputError(
            f"--branch_from={source}: {'; '.join(refused)}; a branch has the model, the data and "
            "the kind of optimizer of its run; leave them out"
        )


def _make_workdir(config: Config, workdir: files.AnyPath, source: files.AnyPath, step: int) -> None:
    """Copies the checkpoint, tokenizer and metrics, links the corpus; redoes a broken copy."""
    checkpoints, marker = workdir / "checkpoints", workdir / FILE
    partial, copied = checkpoints / f"{step}.partial", checkpoints / str(step)
    partial_tokenizer, tokenizer = workdir / "tokenizer.partial", workdir / "tokenizer"
    others = [path for path in steps_in(checkpoints) if path.name != copied.name]
    if others or (copied.exists() and not marker.exists()):
        raise InputError(
            f"workdir {workdir} holds checkpoints that were not copied by --branch_from, and no "
            f"{CONFIG_FILE}; restore that file or choose a new --workdir"
        )
    for left_over in (partial, copied, partial_tokenizer, tokenizer):
        if left_over.exists():
            files.remove_folder(left_over)
    origin = {"from": str(files.absolute_path(source)), "step": step}
    # The marker before all copies, and the config after them: a workdir with the marker alone is an
    # interrupted copy.
    files.write_whole(marker, json.dumps(origin).encode())
    check_whole(source, step)
    files.copy_folder(source / "checkpoints" / str(step), partial)
    files.move_folder(partial, copied)
    files.copy_folder(source / "tokenizer", partial_tokenizer)
    files.move_folder(partial_tokenizer, tokenizer)
    link_corpus(source, workdir)
    copy_metrics(source, workdir, step)
    save_config(config, workdir, new_id(read_facts(copied).get(RUN_ID), step))
