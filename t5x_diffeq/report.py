"""What a person is told, on standard error; standard output is for results."""

import sys
import time

import rich.console
import rich.progress

SECONDS_BETWEEN_LINES = 10


def is_first() -> bool:
    """Whether this is process 0; without JAX, which takes seconds to import, there is no other."""
    jax = sys.modules.get("jax")
    return jax is None or jax.process_index() == 0


def say(*lines: str) -> None:
    """Prints lines on process 0."""
    if is_first():
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def table(title: str, rows: dict[str, str]) -> None:
    """A title and aligned rows."""
    width = max(map(len, rows))
    say(title, *(f"  {name:<{width}}  {value}" for name, value in rows.items()))


def count(number: float) -> str:
    """A number that a person can take in: 950, 12.3k, 1.24M, 6.50B."""
    for size, unit, digits in ((1e12, "T", 2), (1e9, "B", 2), (1e6, "M", 2), (1e3, "k", 1)):
        if abs(number) >= size:
            return f"{number / size:.{digits}f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 03:04:05`."""
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Progress:
    """A bar on a terminal, else a line now and then; within `with`.

    Args:
      title: what is being done.
      total: how much of it there is.
      unit: of `total`.
    """

    def __init__(self, title: str, total: int, unit: str):
        self.title, self.total, self.unit = title, max(total, 1), unit
        self.begun = self.told = time.perf_counter()
        console = rich.console.Console(stderr=True)
        self.bar = rich.progress.Progress(console=console) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, done: int) -> None:
        """Shows that `done` of the total are done."""
        if self.bar:
            self.bar.update(self.task, completed=done)
        elif time.perf_counter() - self.told > SECONDS_BETWEEN_LINES:
            self.told = time.perf_counter()
            left = (self.told - self.begun) * (self.total - done) / done if done else None
            then = f", {duration(left)} left" if left is not None else ""
            say(f"{self.title}: {count(done)} of {count(self.total)} {self.unit}{then}")
