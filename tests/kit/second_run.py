"""Runs tests of real engines; what fails runs once more, alone, when nothing else runs.

    python -m tests.kit.second_run --numprocesses 5 tests/integration tests/e2e

All arguments are pytest's. A test that fails and then passes is printed under FLAKY with what it
said at first, and does not fail the run; one that fails twice does, and so do more than three.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_MOST_FLAKY = 3
_OPTION = "--failures-file"
_PYTEST = (sys.executable, "-m", "pytest", "-p", "tests.kit.second_run")


def main(arguments: Sequence[str]) -> int:
    """Run them; the exit status of a shell."""
    with tempfile.TemporaryDirectory(prefix="second-run") as folder:
        status, failed = _run(Path(folder) / "first", arguments)
        if status != pytest.ExitCode.TESTS_FAILED or not failed:
            return status
        if len(failed) > _MOST_FLAKY:
            print(f"{len(failed)} tests failed: too many to be run once more")
            return status
        print(f"Once more, alone: {' '.join(failed)}", flush=True)
        _, again = _run(Path(folder) / "second", ["-v", *failed])
    for test, words in failed.items():
        print(f"\nFLAKY {test}: it failed, then " + ("failed again" if test in again else "passed"))
        print(words)
    return 1 if again else 0


def _run(file: Path, arguments: Sequence[str]) -> tuple[int, dict[str, str]]:
    """pytest's exit status, and what the tests said that failed."""
    status = subprocess.run([*_PYTEST, f"{_OPTION}={file}", *arguments], check=False).returncode
    failed: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        test, words = json.loads(line)
        failed[test] = failed.get(test, "") + words
    return status, failed


# -- as a plugin of pytest ------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, type=Path, help="where to write what the tests say that fail")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption(_OPTION)
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresFile(file))


class _FailuresFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        sections = "".join(f"\n--- {name}\n{content}" for name, content in report.sections)
        words = f"--- {report.when}\n{report.longreprtext}{sections}\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, words]) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
