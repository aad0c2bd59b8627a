"""The quick part of the compatibility suite; `make compat` runs all of it."""

from pathlib import Path

import pytest

from tests.compat.catalogue import QUICK, Entry
from tests.compat.run import Settings, run_entry


@pytest.mark.timeout(400)  # of two runs, the longest of which takes 20 s on two idle cores
@pytest.mark.parametrize("entry", QUICK, ids=lambda entry: entry.name)
def test_program_gives_the_native_results_when_run_under_exec(entry: Entry, tmp_path: Path) -> None:
    report = run_entry(entry, tmp_path, Settings(limit_s=180))
    assert report.right, "\n".join(report.found)
