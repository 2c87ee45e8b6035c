"""The folder `checkpoints/` of a workdir: what is complete, what is kept, which one is the best.

Orbax renames a folder on this machine to its step when all is written; in a bucket it writes
`commit_success.txt` last, and deletes a folder that lacks it as an interrupted save.

The evaluation loss of a checkpoint is stored with the state of the data, which has checksums;
Orbax's own file of metrics, if damaged, would keep its manager from opening. A milestone is a
checkpoint with a file `MILESTONE`, which a user may add or remove.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import tensorstore
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from t5x_diffeq.system import files
from t5x_diffeq.system.console import log
from t5x_diffeq.system.errors import InputError, is_infrastructure_failure
from t5x_diffeq.system.files import AnyPath

ASIDE = "unreadable_checkpoints"  # a folder of the workdir, beside `checkpoints/`
MARKER = "commit_success.txt"
METADATA = "_CHECKPOINT_METADATA"


def check_path(workdir: AnyPath) -> None:
    """Checks that Orbax can make checkpoints in a workdir, and find their parts there by a glob."""
    folder = workdir / "checkpoints"
    if isinstance(folder, Path) and folder.is_symlink() and not folder.is_dir():
        raise InputError(
            f"{folder} is a link to {folder.readlink()}, which is not a folder; remove the link"
        )
    path = str(files.absolute_path(workdir))
    if special := next((each for each in "[*?" if each in path), None):
        raise InputError(
            f"workdir {path} has {special} in its path, so Orbax can't find the parts of its "
            "checkpoints; choose a --workdir without [, * and ?"
        )


def mark_copies(folder: AnyPath) -> None:
    """Marks checkpoints in a bucket that were copied without their marker; Orbax would delete them.

    Orbax's own metadata say whether it has written all of a checkpoint. A checkpoint that lacks
    both is moved to `unreadable_checkpoints/`. Only one process may call this.
    """
    for step in steps_in(folder) if files.is_in_bucket(folder) else ():
        if (step / MARKER).exists():
            continue
        if not (step / METADATA).exists():
            files.move_folder(step, folder.parent / ASIDE / step.name)
            log(f"warning: checkpoint {step.name} lacks {MARKER} and {METADATA}; moved to {ASIDE}")
        elif files.read_json_object(step / METADATA).get("commit_timestamp_nsecs"):
            files.write_whole(step / MARKER, b"")
            log(f"checkpoint {step.name} is complete but lacks {MARKER}: marked again")


def count_arrays(checkpoint: AnyPath) -> int:
    """How many arrays can be found in a saved train state."""
    # The driver takes no path with "..".
    base: dict[str, str] = {"driver": "file", "path": f"{os.path.realpath(checkpoint / 'state')}/"}
    if files.is_in_bucket(checkpoint):
        bucket, _, path = str(checkpoint).removeprefix(files.BUCKETS).partition("/")
        base = {"driver": "gcs", "bucket": bucket, "path": f"{path}/state/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return sum(key.endswith(b".zarray") for key in store.list().result())


def whole_steps(folder: AnyPath) -> list[int]:
    """The steps of the complete checkpoints in `folder`, oldest first."""
    return sorted(
        int(step.name)
        for step in steps_in(folder)
        if not files.is_in_bucket(step) or (step / MARKER).exists()
    )


def steps_in(folder: AnyPath) -> list[AnyPath]:
    """The folders named after a step."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]


MILESTONE = "MILESTONE"  # the file that keeps a checkpoint
_NOTE = "This checkpoint is a milestone and is never deleted. Remove this file to change that.\n"


@dataclass
class Retention(PreservationPolicy):
    """Tells Orbax at each save which checkpoints to keep; all others are deleted then.

    With `scheduled`, it also keeps the checkpoint to which a rollback goes.
    """

    newest: int  # how many of the newest to keep
    every: int | None = None  # also keep checkpoints whose step is a multiple of this
    best: int = 0  # how many checkpoints with the lowest evaluation loss to keep
    milestones: tuple[int, ...] = ()  # the steps whose checkpoints become milestones
    scheduled: int | None = None
    marked: set[int] = field(default_factory=set)  # the steps with a file `MILESTONE` in the folder
    losses: dict[int, float | None] = field(default_factory=dict)  # by step in the folder

    def look_up(self, folder: AnyPath) -> None:
        """Reads the milestones and losses of the checkpoints that are in a folder now."""
        self.marked = set(marked_steps(folder))
        self.losses = {step: _read_eval_loss(folder / str(step)) for step in whole_steps(folder)}

    def rollback_step(self, steps: Sequence[int]) -> int | None:
        """The newest of these checkpoints that is due even if nothing stops the run.

        If there is none, as after a branch from a run that was stopped, it is the oldest.
        """
        every = self.scheduled or 1
        due = [step for step in steps if step % every == 0 or step in self.milestones]
        return max(due, default=min(steps, default=None))

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Whether each checkpoint, oldest first, is kept."""
        steps = [each.step for each in checkpoints]
        kept = {*steps[-self.newest :], *self.milestones, *self.marked}
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        if self.scheduled:
            kept.add(self.rollback_step(steps))
        kept |= set(_lowest_first({step: self.losses.get(step) for step in steps})[: self.best])
        return [step in kept for step in steps]


def marked_steps(folder: AnyPath) -> list[int]:
    """The steps whose checkpoints a file `MILESTONE` keeps."""
    return sorted(int(step.name) for step in steps_in(folder) if (step / MILESTONE).exists())


def _lowest_first(losses: Mapping[int, float | None]) -> list[int]:
    """The steps that have a loss, the lowest first; of equals, the newest."""
    known = {step: loss for step, loss in losses.items() if loss is not None}
    return sorted(known, key=lambda step: (known[step], -step))


def best_step(workdir: AnyPath) -> int:
    """The step of the checkpoint with the lowest evaluation loss; of equals, the newest.

    Raises:
      InputError: if no checkpoint has an evaluation loss.
    """
    folder = workdir / "checkpoints"
    losses = {step: _read_eval_loss(folder / str(step)) for step in whole_steps(folder)}
    if not (best := _lowest_first(losses)):
        raise InputError(
            f"no checkpoint of {workdir} has an evaluation loss, so none is the best; give one of "
            f"the steps {', '.join(map(str, losses)) or '(there are none yet)'}, or make "
            "train.checkpoint_every a multiple of train.eval_every"
        )
    return best[0]


def read_facts(checkpoint: AnyPath) -> dict[str, Any]:
    """The facts in a checkpoint (`stored.RunFacts`), {} if they can't be read."""
    try:
        return files.read_json_object(checkpoint / "data" / "metadata")
    except Exception as error:
        if is_infrastructure_failure(error):
            raise
        return {}  # it is damaged, or not a checkpoint of ours: restoring it reports that


def _read_eval_loss(checkpoint: AnyPath) -> float | None:
    """The evaluation loss; None if there is none or its file can't be read."""
    loss: Any = read_facts(checkpoint).get("eval_loss")
    is_number = isinstance(loss, int | float) and not isinstance(loss, bool)
    return float(loss) if is_number and isfinite(loss) else None


def mark_milestones(folder: AnyPath, steps: Collection[int]) -> None:
    """Marks the complete checkpoints among `steps`; only one process may call it."""
    for step in set(steps).intersection(whole_steps(folder)):
        path = folder / str(step) / MILESTONE
        if not path.exists():
            files.write_whole(path, _NOTE.encode())
