"""A dozen programs of others, by themselves and under the shim; `make compat` runs all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.catalogue import ENTRIES
from compat.entry import Entry
from compat.run import Settings, run_entry, under_exec
from compat.warm import Warm, warm

pytestmark = pytest.mark.group("programs", seconds=60)

SETTINGS = Settings(limit_s=280)  # the test's own limit comes next
MODULES = ("torch._dynamo",)
DOZEN = (
    "lstm_carried_state",
    "packed_sequences",
    "torch_functions spectra",
    "function_transforms jacobian",
    "control_flow",
    "inplace_updates",
    "hooks",
    "selected_values",
    "input_gradients",
    "threaded_requests",
    "save_and_load",
    "training_recipes gan",
)
CHOSEN = [entry for entry in ENTRIES if entry.name in DOZEN]


@pytest.fixture(scope="module")
def natively() -> Iterator[Warm]:
    """Plain Python with torch imported."""
    with warm(SETTINGS, MODULES) as processes:
        yield processes


@pytest.fixture(scope="module")
def under_shim() -> Iterator[Warm]:
    """A program of `gpufaas exec` with torch imported under the shim; forks share its node."""
    with warm(SETTINGS, MODULES, under_exec(SETTINGS)) as processes:
        yield processes


def test_dozen_is_known() -> None:
    assert {entry.name for entry in CHOSEN} == set(DOZEN)


@pytest.mark.parametrize("entry", CHOSEN, ids=lambda entry: entry.name)
def test_program_gives_the_native_results_when_run_under_exec(
    entry: Entry, natively: Warm, under_shim: Warm, tmp_path: Path
) -> None:
    report = run_entry(entry, tmp_path, natively, under_shim)
    assert report.right, "\n".join(report.found)
