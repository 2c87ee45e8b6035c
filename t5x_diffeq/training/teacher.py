"""The teacher of a distillation: another run's frozen model, from which the run's model learns."""

from dataclasses import replace
from typing import NamedTuple

from t5x_diffeq.checkpoints.restoring import find_step
from t5x_diffeq.checkpoints.workdir import read_config
from t5x_diffeq.config.config import Config
from t5x_diffeq.data.tokenizer import Tokenizer
from t5x_diffeq.data.tokenizer_folder import tokenizer_of_run
from t5x_diffeq.model.language_model import LanguageModel
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, parse_path
from t5x_diffeq.training.load import PretrainedRun
from t5x_diffeq.training.placed_model import check_context, with_attention_on
from t5x_diffeq.training.setup import Setup

_KEY = "train.distill_from"


class Teacher(NamedTuple):
    """The frozen model whose predictions a run distils."""

    model: LanguageModel  # the model, on its own grid
    params: dict  # its parameters, sharded over the run's mesh


def check_teacher(config: Config) -> None:
    """Checks that the teacher has the checkpoint and reads sequences as long as the run's."""
    workdir = _workdir_of(config)
    if workdir is None:
        return
    theirs = read_config(workdir, named=f"{_KEY}=").data.sequence_length
    length = config.data.sequence_length
    if length > theirs:
        raise InputError(
            f"data.sequence_length={length} is longer than the {theirs} tokens of the teacher in "
            f"{_KEY}={workdir}; shorten it, or take another teacher"
        )
    find_step(workdir, config.train.distill_step)


def check_teachers_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Checks that the teacher has the tokenizer of the run."""
    workdir = _workdir_of(config)
    if workdir is None:
        return
    theirs = tokenizer_of_run(workdir, f"{_KEY}=")
    if theirs.fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"{_KEY}={workdir} has another tokenizer than this run, and only predictions of the "
            "same tokens can be compared; set data.tokenizer to the file in its tokenizer/, or "
            "take another teacher"
        )


def load_teacher(setup: Setup) -> Teacher | None:
    """The teacher on its own grid, sharded over the setup's mesh; None if the config has none.

    Call this within `setup.context`, after `check_teacher` and `check_teachers_tokenizer`.

    Raises:
      InputError: if the teacher's checkpoint can't be read, or its block can't split sequences as
        the mesh does.
    """
    workdir = _workdir_of(setup.config)
    if workdir is None:
        return None
    run = PretrainedRun(workdir, setup.model.config.vocab_size, setup.config.train.distill_step)
    length, mesh = setup.model.config.max_length, setup.mesh
    model = replace(run.model, attention="auto", max_length=length)
    check_context(model, mesh)
    try:
        params, step = run.params(mesh, setup.rules)
    except InputError as error:
        raise InputError(f"the teacher in {_KEY}={workdir}: {error}") from error
    log(f"learns from {workdir} at its step {step}")
    # The fastest kernel for the teacher's heads and the setup's sequences and devices.
    segments = not setup.config.data.cross_documents
    fastest, _ = with_attention_on(mesh, model, segments)
    return Teacher(LanguageModel(replace(run.model, attention=fastest.attention)), params)


def _workdir_of(config: Config) -> AnyPath | None:
    """The teacher's workdir, if the config names one."""
    source = config.train.distill_from
    return None if source is None else parse_path(source, _KEY)
