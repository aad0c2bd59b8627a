"""A plugin of pytest that gives one row a test, as soon as the test has ended."""

import json

import pytest

from bench.gpu.part_process import ROW
from bench.gpu.results_file import Row

_WORDS = 400
_FOLDER = "tests/gpu/"


def pytest_configure(config: pytest.Config) -> None:
    """Register with the terminal, whose output is that of pytest even while tests' is captured."""
    config.pluginmanager.register(_Rows(config), "gpu-rows")


class _Rows:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A set-up and a clean-up have rows only where they did not pass."""
        if report.when != "call" and report.passed:
            return
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        assert terminal is not None, "pytest has a terminal"
        terminal.write_line(ROW + json.dumps(_row(report)))
        terminal.flush()


def _row(report: pytest.TestReport) -> Row:
    name = report.nodeid.removeprefix(_FOLDER)
    words = "" if report.passed else _words(report)
    return {"test": name, "outcome": report.outcome, "took_s": report.duration, "words": words}


def _words(report: pytest.TestReport) -> str:
    """The reason of a skip, or the last lines of what failed, which end with the error."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2][:_WORDS]
    return report.longreprtext[-_WORDS:]
