"""Which checkpoints of a workdir are kept, and which one is the best.

The evaluation loss of a checkpoint is stored with the state of the data, which has checksums;
Orbax's own file of metrics, if damaged, would keep its manager from opening. A milestone is a
checkpoint with a file `MILESTONE`, which a user may add or remove.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from t5x_diffeq.checkpoints.checkpoint_folder import steps_in, whole_steps
from t5x_diffeq.system.errors import InputError, is_infrastructure_failure
from t5x_diffeq.system.files import AnyPath, parse_json, write_whole

MILESTONE = "MILESTONE"  # the file that keeps a checkpoint
_NOTE = "This checkpoint is a milestone and is never deleted. Remove this file to change that.\n"


@dataclass
class Retention(PreservationPolicy):
    """Tells Orbax at each save which checkpoints to keep; all others are deleted then.

    With `scheduled`, it also keeps the newest whose step is a multiple of this or a milestone, to
    which a rollback goes.
    """

    newest: int  # how many of the newest to keep
    every: int | None = None  # keep those whose step is a multiple of this
    best: int = 0  # how many of those with the lowest evaluation loss to keep
    milestones: tuple[int, ...] = ()  # the steps whose checkpoints become milestones
    scheduled: int | None = None
    marked: set[int] = field(default_factory=set)  # as milestones in the folder
    losses: dict[int, float | None] = field(default_factory=dict)  # of what is in the folder

    def look_up(self, folder: AnyPath) -> None:
        """Learns milestones and losses of the checkpoints that are in a folder now."""
        self.marked = {int(x.name) for x in steps_in(folder) if (x / MILESTONE).exists()}
        self.losses = {step: _read_eval_loss(folder / str(step)) for step in whole_steps(folder)}

    def is_scheduled(self, step: int) -> bool:
        """Whether a checkpoint at `step` is due even if nothing stops the run."""
        return self.scheduled is None or step % self.scheduled == 0 or step in self.milestones

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Whether each checkpoint, oldest first, is kept."""
        steps = [each.step for each in checkpoints]
        kept = {*steps[-self.newest :], *self.milestones, *self.marked}
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        if self.scheduled:
            kept |= set(list(filter(self.is_scheduled, steps))[-1:])
        kept |= set(_lowest_first({step: self.losses.get(step) for step in steps})[: self.best])
        return [step in kept for step in steps]


def _lowest_first(losses: Mapping[int, float | None]) -> list[int]:
    """The steps that have a loss, the lowest first; of equals, the newest."""
    known = {step: loss for step, loss in losses.items() if loss is not None}
    return sorted(known, key=lambda step: (known[step], -step))


def best_step(workdir: AnyPath) -> int:
    """The checkpoint of a workdir with the lowest evaluation loss; of equals, the newest."""
    folder = workdir / "checkpoints"
    losses = {step: _read_eval_loss(folder / str(step)) for step in whole_steps(folder)}
    if not (best := _lowest_first(losses)):
        raise InputError(
            f"no checkpoint of {workdir} has an evaluation loss, so none is the best; train with a "
            f"train.checkpoint_every that is a multiple of train.eval_every, or give one of the "
            f"steps {', '.join(map(str, losses)) or '(there are none yet)'}"
        )
    return best[0]


def _read_eval_loss(checkpoint: AnyPath) -> float | None:
    """The evaluation loss; None if there is none or its file can't be read."""
    try:
        data = parse_json((checkpoint / "data" / "metadata").read_bytes())
        loss = data.get("eval_loss")
    except Exception as error:
        if is_infrastructure_failure(error):
            raise
        return None  # it is damaged, or not a checkpoint of ours: restoring it says so
    is_number = isinstance(loss, int | float) and not isinstance(loss, bool)
    return float(loss) if is_number and isfinite(loss) else None


def mark_milestones(folder: AnyPath, steps: Collection[int]) -> None:
    """Marks the complete checkpoints among `steps`; only one process may call it."""
    for step in set(steps).intersection(whole_steps(folder)):
        path = folder / str(step) / MILESTONE
        if not path.exists():
            write_whole(path, _NOTE.encode())
