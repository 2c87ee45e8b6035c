"""Counts the CPU seconds of each test, which say more than wall times on a machine that is shared.

Those of a test are of its worker and of all processes that the worker has started, with the
fixtures that the test is the first to need. A daemon that leaves its parent isn't counted.
"""

from collections import Counter
from collections.abc import Iterator

import psutil
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu_seconds", action="store_true", help="all files, and the longest tests")


def _used() -> float:
    """CPU seconds of this process and of its descendants, ended or not."""
    processes = [psutil.Process()]
    total = 0.0
    while processes:
        process = processes.pop()
        try:
            times = process.cpu_times()
            processes += process.children()
        except psutil.Error:  # it has ended since
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class CountedTests:
    """In a worker: puts the CPU seconds of each phase of a test into its report."""

    def __init__(self) -> None:
        self.before = _used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now = _used()
        report.cpu_seconds, self.before = now - self.before, now
        return report


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CountedTests())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The sum, and where most of it goes."""
    whole = terminalreporter.config.getoption("--cpu_seconds")
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu_seconds"):
                tests[report.nodeid] += report.cpu_seconds
    files: Counter[str] = Counter()
    for test, seconds in tests.items():
        files[test.partition("::")[0]] += seconds
    terminalreporter.section(f"CPU seconds: {sum(tests.values()):.0f}")
    shown = [*files.most_common(None if whole else 10), *tests.most_common(300 if whole else 0)]
    for name, seconds in shown:
        terminalreporter.line(f"{seconds:8.1f}  {name}")
