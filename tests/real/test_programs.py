"""A dozen programs of others, by themselves and under the shim; `make compat` runs all of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compat.catalogue import DOZEN
from compat.entry import Entry
from compat.run import Report, Settings
from compat.warm import both_ways

pytestmark = pytest.mark.group("programs", seconds=60)

SETTINGS = Settings(limit_s=280)  # the test's own limit comes next


@pytest.fixture(scope="module")
def compared() -> Iterator[Callable[[Entry, Path], Report]]:
    """Runs an entry both ways."""
    with both_ways(SETTINGS, ("torch._dynamo",)) as run:
        yield run


@pytest.mark.parametrize("entry", DOZEN, ids=lambda entry: entry.name)
def test_program_gives_the_native_results_when_run_under_exec(
    entry: Entry, compared: Callable[[Entry, Path], Report], tmp_path: Path
) -> None:
    report = compared(entry, tmp_path)
    assert report.right, "\n".join(report.found)
