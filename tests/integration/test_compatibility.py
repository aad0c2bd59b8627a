"""The quick programs of others that `make test` does not run; `make compat` runs all there are."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compat.catalogue import DOZEN, QUICK
from compat.entry import Entry
from compat.run import Report, Settings
from compat.warm import both_ways

SETTINGS = Settings(limit_s=180)
MODULES = ("accelerate", "timm", "torch._dynamo", "torchvision", "transformers")

pytestmark = [
    pytest.mark.timeout(400),  # of two runs, the longest of which takes 20 s on two cores
    pytest.mark.group("compat", seconds=150),
]


@pytest.fixture(scope="module")
def compared() -> Iterator[Callable[[Entry, Path], Report]]:
    """Runs an entry both ways."""
    with both_ways(SETTINGS, MODULES) as run:
        yield run


@pytest.mark.parametrize(
    "entry", [entry for entry in QUICK if entry not in DOZEN], ids=lambda entry: entry.name
)
def test_program_gives_the_native_results_when_run_under_exec(
    entry: Entry, compared: Callable[[Entry, Path], Report], tmp_path: Path
) -> None:
    report = compared(entry, tmp_path)
    assert report.right, "\n".join(report.found)
