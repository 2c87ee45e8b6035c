"""What a person is told while something takes long."""

import io
import os
import re
import sys
import time

import pytest
from helpers import ROOT, run_to_end
from patience import patience

from t5x_diffeq.system import console


@pytest.fixture
def frequent_lines(monkeypatch):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.02)


class Said:
    """What was said so far."""

    def __init__(self, capsys):
        self.capsys, self.text = capsys, ""

    def wait_for(self, line):
        """Returns when a line begins so."""
        deadline = time.monotonic() + patience(30)
        while f"\n{line}" not in f"\n{self.text}":
            assert time.monotonic() < deadline, self.text
            self.text += self.capsys.readouterr().err


def test_lines_with_the_time_left(frequent_lines, capsys):
    said = Said(capsys)

    def files():
        said.wait_for("reading: 0:0")  # before the first is done, nothing is known
        yield from range(2)
        said.wait_for("reading: 1 of 4 files, 0:0")
        yield 2
        said.wait_for("reading: 2 of 4 files, 0:0")
        yield 3

    assert list(console.track(files(), "reading", 4, "files")) == [0, 1, 2, 3]
    assert " left" in said.text.splitlines()[-1]


def test_the_time_left():
    progress = console.Progress("reading", 10, "files")
    progress.update(4)
    assert progress.line(60) == "reading: 4 of 10 files, 1:30 left"
    assert console.Progress("compiling").line(75) == "compiling: 1:15 so far"


def test_numbers_as_people_read_them():
    day = 86_400
    seconds = {42: "0:42", 3723: "1:02:03", day - 1: "23:59:59", 2 * day + 3723: "2d 01:02:03"}
    assert {each: console.format_duration(each) for each in seconds} == seconds
    counts = {950: "950", 12_300: "12.3k", -1.24e6: "-1.24M", 6.5e9: "6.50B", 2e12: "2.00T"}
    assert {each: console.format_count(each) for each in counts} == counts


def test_an_error_ends_it(frequent_lines, capsys):
    with pytest.raises(ValueError), console.Progress("failing"):
        raise ValueError
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
    assert not console.Progress.shown


def test_quiet_leaves_warnings(frequent_lines, monkeypatch, capsys):
    monkeypatch.setattr(console, "quiet", True)
    console.log("a line", "warning: another")
    with console.Progress("long"):
        time.sleep(0.1)
    assert capsys.readouterr().err == "warning: another\n"


def test_colour_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    console.write("error: gone")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console.write("error: gone")
    console.write("loss 3.2")
    monkeypatch.setenv("NO_COLOR", "1")
    console.write("error: gone")
    lines = ["error: gone", "\033[1;31merror: \033[0mgone", "loss 3.2", "error: gone"]
    assert capsys.readouterr().err.splitlines() == lines


def test_control_characters_are_shown(capsys):
    console.write("error: \x1b]0;title\x07 \x9b31m a\tb ünïcode")
    assert capsys.readouterr().err == "error: \\x1b]0;title\\x07 \\x9b31m a\tb ünïcode\n"


VERB = """
import sys
from absl import flags
from t5x_diffeq.cli import command_line
from t5x_diffeq.system import console

def main():
    console.log("begins")
    {work}
    console.log("ends")
    return {status}

command_line.run(main, "A verb.", flags.FlagValues())
"""
PRINT = "[print('a result', flush=True) for _ in range(3)]"


def run_verb(shell, work="pass", status=0):
    """The status and messages of a verb that a shell starts: `$VERB` is its command."""
    code = VERB.format(work=work, status=status)
    environment = {**os.environ, "VERB": code, "PYTHON": sys.executable}
    line = shell.replace("VERB", '"$PYTHON" -c "$VERB"')
    ended = run_to_end(["bash", "-c", line], env=environment)
    return ended.returncode, ended.stderr.splitlines()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_files_change_no_status(closed, tmp_path):
    """Nor does what is opened next take their numbers, and what is printed."""
    opened = tmp_path / "opened"
    work = f"file = open({str(opened)!r}, 'w'); {PRINT}"
    assert run_verb(f"VERB {closed}", work, 42)[0] == 42
    assert opened.read_text() == ""


def test_a_reader_of_results_that_ends(capfd):
    """As other programs of Unix end, and without a word."""
    assert run_verb("set -o pipefail; VERB | true", f"import time; time.sleep(1); {PRINT}") == (
        128 + 13,
        ["begins"],
    )
    status, said = run_verb("VERB >/dev/full", PRINT)
    assert (status, said[1:]) == (
        1,
        ["error: standard output can't be written: No space left on device"],
    )


@pytest.mark.parametrize("where", ["2> >(true)", "2>/dev/full"])
def test_a_reader_of_messages_that_ends(where):
    """Nothing is lost by it but the messages."""
    work = f"import time; time.sleep(1); {PRINT}"
    assert run_verb(f"VERB {where} | grep -c result >&2", work)[1] == ["3"]
    assert run_verb(f"VERB {where}", "import time; time.sleep(1)", 42)[0] == 42


class Terminal(io.StringIO):
    def isatty(self):
        return True


WRITTEN = "a title: \x1b]0;root\x07, the clipboard: \x1b]52;c;cm0=\x1b\\, \x9b2J\r\n\tü"
SHOWN = r"a title: \x1b]0;root\x07, the clipboard: \x1b]52;c;cm0=\x1b\, \x9b2J\x0d" "\n\tü\n"


def test_a_terminal_gets_no_control_characters_of_results(monkeypatch):
    """A model can write any; a file or a pipe gets them as they are."""
    for stream, shown in ((Terminal(), SHOWN), (io.StringIO(), f"{WRITTEN}\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        console.print_result(WRITTEN)
        assert stream.getvalue() == shown


def test_a_progress_bar_shows_a_name_as_it_is(monkeypatch):
    """Its library would obey control characters and its own markup in a name."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with console.Progress("copying \x1b]0;root\x07[bold]x[/bold]") as progress:
        progress.bar.refresh()
    shown = sys.stderr.getvalue()
    assert r"copying \x1b]0;root\x07[bold]x[/bold]" in shown and "\x1b]0;" not in shown


def test_every_verb_prints_its_results_by_one_function():
    files = [*(ROOT / "t5x_diffeq" / "cli").glob("*.py")]
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    printing = [line for line in lines if re.match(r"print\(|sys\.stdout\.write", line)]
    assert printing == ["print(text)"]  # of --help and --version
