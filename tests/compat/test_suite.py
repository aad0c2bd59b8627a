"""The suite itself: its catalogue, its comparison and its page."""

import re
from pathlib import Path

import pytest
import torch

from tests.compat.catalogue import ENTRIES, PROGRAMS, QUICK, TABLE_1, Entry
from tests.compat.compare import differences, identical
from tests.compat.page import page
from tests.compat.run import Report, Run, Verdict

ONES = {"a": torch.ones(3), "n": [1, "x", None]}
STATS = (
    '{"graph_calls": 3, "graph_operators": 96, "local_operators": 4,'
    ' "local_calls": {"hooks": 2}, "loads": 1}'
)


def different(expected: object, actual: object, loosen: float = 1.0) -> bool:
    return any(differences(expected, actual, loosen))


def test_catalogue_names_every_program_file() -> None:
    assert {entry.path.name for entry in ENTRIES} == {path.name for path in PROGRAMS.glob("*.py")}


def test_catalogue_has_distinct_entries_of_at_least_66_programs() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert len({entry.program for entry in ENTRIES}) >= 66


def test_catalogue_has_table_1_at_both_batch_sizes() -> None:
    models = [model for family in TABLE_1.values() for model in family]
    assert len(models) == 22
    assert {f"resnet {model} {batch}" for model in TABLE_1["resnet"] for batch in (1, 32)} <= {
        entry.name for entry in ENTRIES
    }


def test_quick_entries_hold_three_of_table_1_at_batch_32() -> None:
    assert sum(entry.program in TABLE_1 and entry.args[-1] == "32" for entry in QUICK) == 3


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_program_knows_nothing_of_us(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search("gpufaas|shim|gpu_manager|remote", text, re.IGNORECASE)


def test_comparison_finds_nothing_when_results_are_the_same() -> None:
    assert identical(ONES, {"a": torch.ones(3), "n": [1, "x", None]})
    assert not different(
        torch.tensor([float("nan"), float("inf")]), torch.tensor([float("nan"), float("inf")])
    )


@pytest.mark.parametrize(
    "actual",
    [
        {"a": torch.ones(3) + 1e-3, "n": [1, "x", None]},
        {"a": torch.ones(3).double(), "n": [1, "x", None]},
        {"a": torch.ones(3, 1), "n": [1, "x", None]},
        {"a": torch.tensor([1, float("nan"), 1]), "n": [1, "x", None]},
        {"a": torch.tensor([1, float("inf"), 1]), "n": [1, "x", None]},
        {"a": torch.ones(3), "n": [1, "y", None]},
        {"a": torch.ones(3), "n": [1, "x"]},
        {"a": torch.ones(3), "n": [True, "x", None]},
        {"a": torch.ones(3), "n": (1, "x", None)},
        {"a": torch.ones(3)},
        {"a": torch.ones(3), "n": [1, "x", None], "more": 1},
    ],
    ids=str,
)
def test_comparison_finds_a_difference_when_there_is_one(actual: object) -> None:
    assert different(ONES, actual)


def test_comparison_is_close_but_not_identical_within_the_tolerance() -> None:
    near = {"a": torch.ones(3) + 5e-5, "n": [1, "x", None]}
    assert not different(ONES, near)
    assert not identical(ONES, near)
    assert different(ONES, near, loosen=0.1)


def test_comparison_holds_small_values_to_the_usual_size() -> None:
    big = torch.tensor([1000.0, 0.0])
    assert not different(big, big + 0.05)
    assert different(big, big + 0.5)


def test_comparison_wants_integers_equal() -> None:
    assert different(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_page_counts_what_agrees_and_what_runs_in_graphs() -> None:
    native = Run(0, 2.0, "5.00 ms a call", "")
    good = Run(0, 6.0, "10.00 ms a call", f"a warning\n{STATS}\n")
    poor = Run(0, 6.0, "", STATS.replace("96", "4"))
    reports = [
        Report(Entry("one"), Verdict.EQUAL, native, good),
        Report(Entry("two"), Verdict.CLOSE, native, poor),
        Report(Entry("three"), Verdict.REFUSED, native, Run(1, 1.0, "", "no"), ("no such device",)),
    ]
    text = page(reports, "wait", "a test")
    assert "3 programs: 2 agree (1 to the last bit)" in text
    assert "1 refuse clearly, 0 differ, 0 fail." in text
    assert "1 of 2 programs with a model (50%)" in text
    assert "| `one` | equal | 96.0% | hooks 2 | 3.00 | 2.00 |" in text
    assert "- `three`: no such device" in text


def test_stats_are_none_when_the_run_printed_none() -> None:
    assert Run(0, 1.0, "", "no json here").stats is None
