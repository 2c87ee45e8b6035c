"""What signals do to a single process."""

import os
import signal

import pytest

from t5x_diffeq.cluster.signals import StopSignals


def test_further_sigterms_change_nothing():
    """SLURM sends several within a second; the first one's save must end."""
    with StopSignals() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == (42, "SIGTERM")


def test_a_second_ctrl_c_acts_at_once():
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores it
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.should_stop()
        for number in (signal.SIGTERM, signal.SIGHUP):  # the terminal is closed meanwhile
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.reason.status == 130
    signal.signal(signal.SIGINT, found)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_and_a_warning_stop_as_sigterm_does(number):
    before = signal.signal(number, signal.SIG_DFL)  # nohup of these tests ignores SIGHUP
    with StopSignals() as stop:
        os.kill(os.getpid(), number)
        assert stop.should_stop()
    assert stop.reason == (42, signal.Signals(number).name)
    signal.signal(number, before)


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.should_stop()
    signal.signal(signal.SIGHUP, before)
