"""Which checkpoints of a workdir are kept, and which one is the best.

Orbax's preservation policies decide. The evaluation loss of a checkpoint is stored with the state
of the data, which has checksums; Orbax's own file of metrics, if damaged, would keep its manager
from opening. A milestone is a checkpoint with a file `MILESTONE`, which a user may add or remove.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from t5x_diffeq.checkpoints.checkpoint_folder import steps_in, whole_steps
from t5x_diffeq.runtime.errors import InputError, is_of_machinery
from t5x_diffeq.runtime.files import AnyPath

MILESTONE = "MILESTONE"  # the file that keeps a checkpoint
_EVAL_LOSS = "eval_loss"
_NOTE = "This checkpoint is a milestone and is never deleted. Remove this file to change that.\n"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept; all others are deleted after a save.

    Attributes:
      newest: how many of the newest to keep.
      every: keep those whose step is a multiple of this; None: no others.
      best: how many of those with the lowest evaluation loss to keep.
      milestones: the steps whose checkpoints become milestones.
      scheduled: keep also the newest whose step is a multiple of this or a milestone, to which a
        rollback goes; None: there are no rollbacks.
    """

    newest: int
    every: int | None = None
    best: int = 0
    milestones: tuple[int, ...] = ()
    scheduled: int | None = None

    def is_scheduled(self, step: int) -> bool:
        """Whether a checkpoint at `step` is due even if nothing stops the run."""
        return self.scheduled is None or step % self.scheduled == 0 or step in self.milestones

    def policy(self, folder: AnyPath) -> policies.AnyPreservationPolicy:
        """Orbax's policy for the checkpoints in `folder`, whose milestones are looked up now."""
        chosen = [
            policies.LatestN(self.newest),
            policies.CustomSteps({*self.milestones, *milestones_in(folder)}),
        ]
        if self.every:
            chosen.append(policies.EveryNSteps(self.every))
        if self.scheduled:
            chosen.append(_NewestScheduled(self))
        if self.best:
            best = policies.BestN(
                get_metric_fn=lambda metrics: metrics[_EVAL_LOSS],
                reverse=True,  # the lowest loss is the best
                n=self.best,
                keep_checkpoints_without_metrics=False,
            )
            chosen.append(best)
        return policies.AnyPreservationPolicy(chosen)


@dataclass
class _NewestScheduled(policies.PreservationPolicy):
    """Keeps the checkpoint that a rollback goes to."""

    retention: Retention

    def should_preserve(
        self,
        checkpoints: Sequence[Any],
        *,
        context: Any,
    ) -> Sequence[bool]:
        """Whether each checkpoint, oldest first, is kept."""
        newest = max(
            (each.step for each in checkpoints if self.retention.is_scheduled(each.step)),
            default=None,
        )
        return [each.step == newest for each in checkpoints]


class RetainingManager(ocp.CheckpointManager):
    """Orbax's manager, which takes a checkpoint's evaluation loss from its `data` item."""

    def metrics(self, step: int) -> dict[str, float] | None:
        """The evaluation loss of a checkpoint, as Orbax's policies take it; None without one."""
        return as_metrics(_read_eval_loss(self.directory / str(step)))


def as_metrics(eval_loss: float | None) -> dict[str, float] | None:
    """An evaluation loss as Orbax's policies take it."""
    return None if eval_loss is None else {_EVAL_LOSS: eval_loss}


def best_step(workdir: AnyPath) -> int:
    """The checkpoint of a workdir with the lowest evaluation loss; of equals, the newest.

    Raises:
      InputError: if no checkpoint has an evaluation loss.
    """
    folder = workdir / "checkpoints"
    losses = {step: _read_eval_loss(folder / str(step)) for step in whole_steps(folder)}
    known = {step: loss for step, loss in losses.items() if loss is not None}
    if not known:
        raise InputError(
            f"no checkpoint of {workdir} has an evaluation loss, so none is the best; train with a "
            f"train.checkpoint_every that is a multiple of train.eval_every, or give one of the "
            f"steps {', '.join(map(str, losses)) or '(there are none yet)'}"
        )
    return min(known, key=lambda step: (known[step], -step))


def _read_eval_loss(checkpoint: AnyPath) -> float | None:
    """The evaluation loss; None if there is none or its file can't be read."""
    try:
        data = json.loads((checkpoint / "data" / "metadata").read_text())
        loss = data.get(_EVAL_LOSS)
    except Exception as error:
        if is_of_machinery(error):
            raise
        return None  # it is damaged, or not a checkpoint of ours: restoring it says so
    is_number = isinstance(loss, int | float) and not isinstance(loss, bool)
    return float(loss) if is_number and isfinite(loss) else None


# ------------------------------------------------------------------------------ milestones


def milestones_in(folder: AnyPath) -> set[int]:
    """The steps of the checkpoints that are marked as milestones."""
    return {int(step.name) for step in steps_in(folder) if (step / MILESTONE).exists()}


def mark_milestones(folder: AnyPath, steps: Collection[int]) -> None:
    """Marks the complete checkpoints among `steps`; only one process may call it."""
    if not steps:
        return
    for step in set(steps).intersection(whole_steps(folder)):
        path = folder / str(step) / MILESTONE
        if not path.exists():
            path.write_text(_NOTE)
