"""Computes where the time of a run went, over all of its attempts, from the run's history.

Goodput is the part of the time since the first start that went into optimizer steps which the run
still has. Among the rest, `lost` are the seconds of steps that were taken again, after a crash or a
rollback, and `down` are the seconds between the end of an attempt and the start of the next one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# What the seconds of an attempt are spent on.
STARTUP, COMPILE, DATA, STEPS = "startup", "compile", "data", "steps"
EVALUATION, CHECKPOINT, ROLLBACK = "evaluation", "checkpoint", "rollback"
OTHER = "other"  # samples of text, figures, profiles, own hooks
ACTIVITIES = (STARTUP, COMPILE, DATA, STEPS, EVALUATION, CHECKPOINT, ROLLBACK, OTHER)
LOST, DOWN = "lost", "down"
COLUMNS = (*ACTIVITIES, LOST, DOWN)
UNKNOWN = "unknown"


@dataclass
class Attempt:
    """One start of the training command; times are in seconds since 1970."""

    began: float
    first: int  # the step at which it started
    total_steps: int
    last: int  # the last step that is known to be done
    last_event: float  # the time of its last event
    # the name of the exception that ended it, or None; UNKNOWN if the history has no end of it
    error: str | None = UNKNOWN
    seconds: Mapping[str, float] = field(default_factory=dict)  # by activity, with the lost seconds
    # by step, the seconds of steps up to it, without the lost seconds
    steps_at: dict[int, float] = field(default_factory=dict)
    lost: float = 0.0  # seconds of steps that were taken again
    down: float = 0.0  # seconds until the next attempt

    def lose_after(self, step: int) -> None:
        """Counts the time of its steps after `step` as lost."""
        if step >= self.last:
            return
        self.steps_at = {at: net for at, net in self.steps_at.items() if at <= step}
        self.lost = self.seconds.get(STEPS, 0.0) - max(self.steps_at.values(), default=0.0)
        self.last = step

    def columns(self) -> dict[str, float]:
        """The seconds of each of `COLUMNS`."""
        seconds = {**dict.fromkeys(COLUMNS, 0.0), **self.seconds, LOST: self.lost, DOWN: self.down}
        return {**seconds, STEPS: seconds[STEPS] - self.lost}


def attempts_of(events: Sequence[Mapping]) -> list[Attempt]:
    """The attempts of a run, oldest first, given the events of its history."""
    attempts: list[Attempt] = []
    for event in events:
        add_event(attempts, event)
    return attempts


def add_event(attempts: list[Attempt], event: Mapping) -> None:
    """Adds the next event of a history to its attempts."""
    kind, now, step = event["event"], event["time"], event["step"]
    if kind == "start":
        for earlier in attempts:
            earlier.lose_after(step)
        if attempts:
            attempts[-1].down = max(0.0, event["began"] - attempts[-1].last_event)
        attempts.append(Attempt(event["began"], step, event["total_steps"], step, now))
    if not attempts:
        return  # the file's beginning was cut off
    attempt = attempts[-1]
    attempt.last_event = now
    if kind == "time":
        attempt.seconds, attempt.last = event["seconds"], step
        attempt.steps_at[step] = event["seconds"].get(STEPS, 0.0) - attempt.lost
    elif kind == "rollback":
        for each in attempts:
            each.lose_after(event["to"])
    elif kind == "end":
        attempt.error = event["error"]


def total_columns(attempts: Sequence[Attempt]) -> dict[str, float]:
    """The seconds of each of `COLUMNS`, over all attempts."""
    each = [attempt.columns() for attempt in attempts]
    return {name: sum(columns[name] for columns in each) for name in COLUMNS}


def goodput(attempts: Sequence[Attempt]) -> float:
    """The part of the time since the first start in which steps ran that the run still has."""
    wall = wall_seconds(attempts)
    return total_columns(attempts)[STEPS] / wall if wall > 0 else 0.0


def wall_seconds(attempts: Sequence[Attempt]) -> float:
    """The time from the first start to the last event."""
    return attempts[-1].last_event - attempts[0].began


def seconds_left(attempt: Attempt) -> float | None:
    """The seconds left at this attempt's pace, with evaluations and saves.

    None if the attempt has finished no step.
    """
    done = attempt.last - attempt.first
    if done < 1:
        return None
    columns = attempt.columns()
    pace = sum(columns[name] for name in ACTIVITIES if name not in (STARTUP, COMPILE)) / done
    return (attempt.total_steps - attempt.last) * pace
