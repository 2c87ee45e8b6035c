"""Reads how a run stands from the files in its workdir: its step, losses, times and state."""

from dataclasses import dataclass
from functools import cached_property

from t5x_diffeq.checkpoints.checkpoint_folder import whole_steps
from t5x_diffeq.system.console import format_duration
from t5x_diffeq.system.files import AnyPath
from t5x_diffeq.training import goodput
from t5x_diffeq.training.history import read_events
from t5x_diffeq.training.tracking.jsonl import read_metrics

_LOSS, _BITS = "eval/loss", "eval/bits_per_byte"
_SECONDS_OF_SILENCE = 600  # after which a run that never said that it ended may have been killed


@dataclass(frozen=True)
class RunStatus:
    """What the files of a run say at some time."""

    workdir: AnyPath
    now: float  # seconds since 1970

    @cached_property
    def events(self) -> list:
        """The events of its history."""
        return read_events(self.workdir)

    @cached_property
    def attempts(self) -> list[goodput.Attempt]:
        """Its attempts, oldest first; none if it has no history."""
        return goodput.attempts_of(self.events)

    @cached_property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """The lines of its evaluations by step, in the order of the steps."""
        lines = {int(line["step"]): line for line in read_metrics(self.workdir, _LOSS)}
        return {step: lines[step] for step in sorted(lines)}

    @property
    def losses(self) -> dict[int, float]:
        """Its evaluation losses by step, in the order of the steps."""
        return {step: line[_LOSS] for step, line in self.evaluations.items()}

    @property
    def bits_per_byte(self) -> float | None:
        """Its bits per byte at the last evaluation, if that has them."""
        last = list(self.evaluations.values())[-1:]
        return last[0].get(_BITS) if last else None

    @property
    def step(self) -> int:
        """The last step that is known to be done."""
        if self.attempts:
            return self.attempts[-1].last
        return max([*self.losses, *whole_steps(self.workdir / "checkpoints")], default=0)

    @property
    def state(self) -> str:
        """`done`, `running`, `stopped`, `failed (...)` or `silent for ...`.

        Without a history, it is `converted` or `unknown`.
        """
        if not self.attempts:
            is_new = (self.workdir / "checkpoints" / "0").exists()  # no training saves step 0
            return "converted" if is_new else "unknown"
        last = self.attempts[-1]
        if last.error == goodput.UNKNOWN:
            silence = self.now - last.last_event
            is_long = silence > _SECONDS_OF_SILENCE
            return f"silent for {format_duration(silence)}" if is_long else "running"
        if last.error:
            return f"failed ({last.error})"
        return "done" if last.last >= last.total_steps else "stopped"

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds left; None if the run isn't running, or has finished no step."""
        return goodput.seconds_left(self.attempts[-1]) if self.state == "running" else None

    @property
    def spikes(self) -> int:
        """The number of spikes; a spike that recurs after a restart counts once."""
        counts = [each["count"] for each in self.events if each["event"] == "spike"]
        return counts[-1] if counts else 0

    @property
    def rollbacks(self) -> int:
        """The number of rollbacks that spikes have caused."""
        return len({each["count"] for each in self.events if each["event"] == "rollback"})

    def facts(self) -> dict[str, object]:
        """Everything as one JSON object; times in seconds."""
        losses = self.losses
        facts: dict[str, object] = {
            "workdir": str(self.workdir),
            "state": self.state,
            "step": self.step,
            "loss": list(losses.values())[-1] if losses else None,
            "lowest": min(losses.values()) if losses else None,
            "bits_per_byte": self.bits_per_byte,
        }
        if self.attempts:
            facts |= {
                "total_steps": self.attempts[-1].total_steps,
                "goodput": goodput.goodput(self.attempts),
                "seconds": goodput.total_columns(self.attempts),
                "attempts": [each.columns() for each in self.attempts],
                "spikes": self.spikes,
                "rollbacks": self.rollbacks,
                "seconds_left": self.seconds_left,
            }
        return facts
