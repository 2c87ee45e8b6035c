"""Nothing keeps a process from its end."""

import threading

from t5x_diffeq.runtime import peers
from t5x_diffeq.runtime.peers import _LastWord


def test_a_last_line_that_cannot_be_printed(monkeypatch):
    def fail(line):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(peers, "write", fail)
    _LastWord().say("the disk is full")


def test_a_first_thread_that_does_not_end_the_process(monkeypatch, capsys):
    monkeypatch.setattr(peers, "_SECONDS_TO_END", 0.2)
    last_word = _LastWord()
    first = threading.Thread(target=last_word.say, args=("process 1 was lost",))
    first.start()
    first.join()
    last_word.say("a link failed")  # returns, so that this thread can end the process
    assert capsys.readouterr().err == "error: process 1 was lost\n"
