"""The quick part of the programs of others; `make compat` runs all of them, `make test` a dozen."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.catalogue import QUICK
from compat.entry import Entry
from compat.run import Settings, run_entry, under_exec
from compat.warm import Warm, warm

SETTINGS = Settings(limit_s=180)
MODULES = ("accelerate", "timm", "torch._dynamo", "torchvision", "transformers")

pytestmark = [
    pytest.mark.timeout(400),  # of two runs, the longest of which takes 20 s on two cores
    pytest.mark.group("compat", seconds=320),
]


@pytest.fixture(scope="module")
def natively() -> Iterator[Warm]:
    """Plain Python with torch imported."""
    with warm(SETTINGS, MODULES) as found:
        yield found


@pytest.fixture(scope="module")
def under_shim() -> Iterator[Warm]:
    """A program of `gpufaas exec` with torch imported under the shim; forks share its node."""
    with warm(SETTINGS, MODULES, under_exec(SETTINGS)) as found:
        yield found


@pytest.mark.parametrize("entry", QUICK, ids=lambda entry: entry.name)
def test_program_gives_the_native_results_when_run_under_exec(
    entry: Entry, natively: Warm, under_shim: Warm, tmp_path: Path
) -> None:
    report = run_entry(entry, tmp_path, natively, under_shim)
    assert report.right, "\n".join(report.found)
