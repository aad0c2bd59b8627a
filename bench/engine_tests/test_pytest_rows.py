"""One row for each test of `tests/gpu`, there as soon as the test has ended."""

import os
import subprocess
import sys
from pathlib import Path

from bench.gpu.part_process import ROW, marked

ROOT = Path(__file__).parents[2]
TESTS = """
import os
import pytest

def test_passes():
    print("words of the test")

@pytest.mark.skip(reason="needs a card")
def test_skipped():
    pass

def test_fails():
    assert 1 + 1 == 3, "a wrong sum"

@pytest.fixture
def broken():
    raise RuntimeError("no set-up")

def test_is_not_begun(broken):
    pass

def test_crashes():
    os.abort()

def test_is_never_reached():
    pass
"""


def test_rows_are_said_one_by_one_until_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "test_of_a_card.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", str(file), "-v", "-c", os.devnull]
    command += ["--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-p", "bench.gpu.pytest_rows"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # noqa: TID251 - for a child
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )
    rows = [
        row for line in ran.stdout.splitlines() if isinstance(row := marked(line, ROW)[1], dict)
    ]
    outcomes = [(row["test"].partition("::")[2], row["outcome"]) for row in rows]
    assert outcomes == [
        ("test_passes", "passed"),
        ("test_skipped", "skipped"),
        ("test_fails", "failed"),
        ("test_is_not_begun", "failed"),
    ]
    assert [row["words"] for row in rows[:2]] == ["", "Skipped: needs a card"]
    assert "a wrong sum" in rows[2]["words"]
    assert "no set-up" in rows[3]["words"]
    assert ran.returncode < 0
