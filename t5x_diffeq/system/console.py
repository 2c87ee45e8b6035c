"""Messages to the user, on standard error; standard output is for results.

Colour and progress bars are for terminals only; NO_COLOR turns colour off.
"""

import io
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    import rich.progress

SECONDS_BETWEEN_LINES = 10  # of progress, where standard error is not a terminal
_WARNING = "warning: "  # prefix of the lines that --quiet keeps
ERROR = "error: "  # prefix of the last line of a failure
_COLOURS = {_WARNING: "1;33", ERROR: "1;31"}  # bold yellow, bold red
# Control characters but for a new line and a tab: a terminal would obey them.
_ESCAPES = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}
Item = TypeVar("Item")
quiet = False  # set by --quiet


def _is_first() -> bool:
    """Whether this is process 0.

    It does not ask JAX, which would start the devices: a verb whose work is done by other commands
    must leave the devices to them.
    """
    processes = sys.modules.get("t5x_diffeq.cluster.processes")
    return processes is None or processes.peers is None or processes.peers.index == 0


def log(*lines: str) -> None:
    """Prints lines on process 0; with --quiet, only warnings."""
    if _is_first():
        for line in lines:
            if not quiet or line.startswith(_WARNING):
                write(line)


def write(line: str) -> None:
    """Prints a line on every process; on a terminal, `warning:` and `error:` are coloured.

    Control characters, which names of files and texts may hold, are shown as `\\x1b` and the like.
    """
    line = escape_controls(line)
    for mark, colour in _COLOURS.items():
        if line.startswith(mark) and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            line = f"\033[{colour}m{mark}\033[0m{line.removeprefix(mark)}"
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # its reader has ended, or its disk is full: the work goes on, as with nohup
        discard(2)


def escape_controls(text: str) -> str:
    """The text with control characters, which a terminal would obey, as `\\x1b` and the like."""
    return text.translate(_ESCAPES)


def print_result(text: object) -> None:
    """Prints a result on standard output: as it is, but without control characters on a terminal.

    A result may hold what a model wrote, or what a file of somebody else says.
    """
    print(escape_controls(str(text)) if sys.stdout.isatty() else text, flush=True)


def prepare_outputs() -> None:
    """Replaces closed standard files by /dev/null, and standard output by one of class `Results`.

    Otherwise the next file to be opened would get the number of a closed one, and libraries would
    write their output into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            discard(number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115
    if type(sys.stdout) is io.TextIOWrapper:  # and not a replacement that tests or notebooks made
        before = sys.stdout
        file = open(before.fileno(), "wb", closefd=False)  # noqa: SIM115
        at_once = before.line_buffering or before.write_through
        strict = before.errors == "strict" and before.encoding.lower() not in ("utf-8", "utf8")
        errors = "backslashreplace" if strict else before.errors  # not all encodings have all text
        sys.stdout = Results(file, before.encoding, errors, line_buffering=at_once)
        sys.stdout.before = before  # Python would close the file if nothing referred to `before`


def discard(*numbers: int) -> None:
    """Redirects these standard files to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        if number != nowhere:
            os.dup2(nowhere, number)
    if nowhere > 2:
        os.close(nowhere)


def leave_terminal() -> None:
    """Discards what is written to a terminal, which is gone."""
    discard(*(number for number in (1, 2) if os.isatty(number)))


class Results(io.TextIOWrapper):
    """Standard output, in place of `before`; `error` is the first error of writing to it."""

    error: OSError | None = None
    before: TextIO | None = None

    def write(self, text: str) -> int:
        """Writes the text."""
        with self._remembering():
            return super().write(text)

    def flush(self) -> None:
        """Writes what is left."""
        with self._remembering():
            super().flush()

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise


def results_error() -> OSError | None:
    """Why results couldn't be written to standard output; None if all were."""
    with suppress(OSError):
        sys.stdout.flush()
    error = getattr(sys.stdout, "error", None)
    if error:
        discard(sys.stdout.fileno())  # else the interpreter would try again at its end
    return error


def print_table(title: str, rows: dict[str, str]) -> None:
    """Prints a title, and a line with each row's name and value, aligned."""
    width = max(map(len, rows))
    log(title, *(f"  {name:<{width}}  {value}" for name, value in rows.items()))


def align(lines: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """The lines of a table, each column as wide as its widest cell and two spaces from the next.

    The columns with the indices `left` are left-aligned, the others right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            f"{cell:{'<' if n in left else '>'}{width}}"
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def format_count(number: float) -> str:
    """A number in human-readable form: 950, 12.3k, 1.24M, 6.50B."""
    for size, unit, digits in ((1e12, "T", 2), (1e9, "B", 2), (1e6, "M", 2), (1e3, "k", 1)):
        if abs(number) >= size:
            return f"{number / size:.{digits}f}{unit}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 03:04:05`."""
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Progress:
    """A context that shows progress: a bar on a terminal, else a line every ten seconds.

    Nothing is shown on processes other than the first, with --quiet, or within another `Progress`.
    If the total is None, the elapsed time is shown.
    """

    shown = False  # whether a progress is being shown

    def __init__(self, title: str, total: int | None = None, unit: str = ""):
        self.title, self.total, self.unit = title, total and max(total, 1), unit
        self.done = 0
        self.bar: rich.progress.Progress | None = None  # on a terminal
        self.ended = threading.Event()

    def __enter__(self) -> "Progress":
        self.start = time.perf_counter()
        self.is_shown = _is_first() and not quiet and not Progress.shown
        if self.is_shown:
            Progress.shown = True
            if sys.stderr.isatty():
                self.bar = _bar(self.title, self.total)
                self.bar.start()
            else:
                threading.Thread(target=self._print_lines, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.is_shown:
            Progress.shown = False
        if self.bar:
            self.bar.stop()

    def update(self, done: int, total: int | None = None) -> None:
        """Shows that `done` of the total are done; a total that is known only now may be given."""
        self.done, self.total = done, total or self.total
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=done, total=self.total)

    def _print_lines(self) -> None:
        while not self.ended.wait(SECONDS_BETWEEN_LINES):
            log(self.line(time.perf_counter() - self.start))

    def line(self, seconds: float) -> str:
        """`evaluating: 12 of 40 batches, 0:42 left`, or the elapsed time."""
        if not (self.total and self.done):
            return f"{self.title}: {format_duration(seconds)} so far"
        left = seconds * (self.total - self.done) / self.done
        amount = f"{format_count(self.done)} of {format_count(self.total)} {self.unit}"
        return f"{self.title}: {amount}, {format_duration(left)} left"


def _bar(title: str, total: int | None) -> "rich.progress.Progress":
    """A rich progress bar of one task, which disappears when it is done."""
    from rich.console import Console  # takes 0.2 s, for terminals only
    from rich.markup import escape
    from rich.progress import Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(escape(escape_controls(title)), total=total)
    return bar


def track(items: Iterable[Item], title: str, total: int, unit: str) -> Iterator[Item]:
    """Yields the items; shows how many were taken and the estimated time left."""
    with Progress(title, total, unit) as progress:
        for done, item in enumerate(items):
            progress.update(done)
            yield item
