"""Which run a workdir and a checkpoint belong to.

The runs of a sweep have checkpoints with the same shapes, steps and data. So each run has an id,
which `config.json` and every checkpoint keep. The id of a branch says with which checkpoint it
begins: `RUN@STEP/ID`. Runs and checkpoints of earlier versions have no id.
"""

import uuid
from collections.abc import Iterable

from t5x_diffeq.checkpoints.checkpoint_folder import read_facts
from t5x_diffeq.config.config import CONFIG_FILE, is_run
from t5x_diffeq.system.errors import InputError
from t5x_diffeq.system.files import AnyPath, read_json_object
from t5x_diffeq.system.foreign_files import read_inside

RUN_ID = "run_id"  # the id's key in `config.json`, and among a checkpoint's facts
_ID_FILE = "run_id"  # which runs of earlier versions with local checkpoints have


def new_id(origin: str | None = None, step: int = 0) -> str:
    """The id of a new run, or of one that branches off the run `origin` at `step`."""
    own = uuid.uuid4().hex
    return f"{origin}@{step}/{own}" if origin else own


def run_of(workdir: AnyPath) -> str | None:
    """The id of the run in a workdir; None if it has none yet."""
    try:
        run_id = read_json_object(workdir / CONFIG_FILE).get(RUN_ID)
    except (OSError, ValueError):
        run_id = None  # whoever reads the config reports it
    if run_id is None and (workdir / _ID_FILE).exists():
        return read_inside(workdir / _ID_FILE).decode("utf-8")
    return None if run_id is None else str(run_id)


def check_owner(workdir: AnyPath, steps: Iterable[int]) -> None:
    """Raises an InputError if another run made one of these checkpoints of a workdir's run."""
    if not is_run(workdir):
        return
    run = run_of(workdir)
    for step in steps:
        folder = workdir / "checkpoints" / str(step)
        owner = read_facts(folder).get(RUN_ID)
        began_with_it = run is not None and run.startswith(f"{owner}@{step}/")
        if owner not in (None, run) and not began_with_it:
            raise InputError(
                f"checkpoint {folder} was made by another run, {owner}, and the workdir belongs to "
                f"{f'run {run}' if run else 'a run of an earlier version, which has no id'}; "
                "remove that folder, or continue the other run in a new --workdir with "
                "--branch_from=ITS_WORKDIR"
            )
