"""The suite itself: its catalogue, its runs, its comparison and its page."""

import json
import re
from pathlib import Path

import pytest
import torch

from compat.__main__ import main
from compat.catalogue import DOZEN, ENTRIES, QUICK
from compat.compare import differences, identical
from compat.entries.vision import TABLE_1
from compat.entry import GROUPS, PROGRAMS, Entry
from compat.lanes import batches, run_in_lanes
from compat.page import page
from compat.rows import Row, add_row, in_order, read_rows, row_of
from compat.run import Report, Run, Settings, Verdict, run_entry
from compat.warm import Warm, WarmRunner, warm
from tests.kit.programs.warm_process import WarmProcessEnded, warm_process

ONES = {"a": torch.ones(3), "n": [1, "x", None]}
STATS = (
    '{"graph_calls": 3, "graph_operators": 96, "local_operators": 4,'
    ' "local_calls": {"hooks": 2}, "loads": 1}'
)


def different(expected: object, actual: object, loosen: float = 1.0) -> bool:
    return any(differences(expected, actual, loosen))


def test_catalogue_names_every_program_file() -> None:
    assert {entry.path.name for entry in ENTRIES} == {path.name for path in PROGRAMS.glob("*.py")}


def test_catalogue_has_at_least_400_distinct_entries_of_known_groups() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) >= 400
    assert {entry.group for entry in ENTRIES} == set(GROUPS)


def test_catalogue_has_table_1_at_both_batch_sizes() -> None:
    models = [model for family in TABLE_1.values() for model in family]
    assert len(models) == 22
    assert {f"resnet {model} {batch}" for model in TABLE_1["resnet"] for batch in (1, 32)} <= {
        entry.name for entry in ENTRIES
    }


def test_quick_entries_hold_one_of_table_1_at_batch_32() -> None:
    assert sum(entry.program in TABLE_1 and entry.args[-1] == "32" for entry in QUICK) == 1


def test_dozen_is_known() -> None:
    assert len(DOZEN) == 12


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
    native = Run(0, 2.0, "4.00 ms to the first answer\n5.00 ms a call", "")
    good = Run(0, 6.0, "30.00 ms to the first answer\n10.00 ms a call", f"a warning\n{STATS}\n")
    poor = Run(0, 6.0, "", STATS.replace("96", "4"))
    reports = [
        Report(Entry("one"), Verdict.EQUAL, native, good),
        Report(Entry("two"), Verdict.CLOSE, native, poor),
        Report(Entry("three"), Verdict.REFUSED, native, Run(1, 1.0, "", "no"), ("no such device",)),
        Report(Entry("four", trains=True), Verdict.EQUAL, native, poor),
    ]
    text = page([row_of(report) for report in reports], "wait", "a test")
    assert "4 programs: 3 agree (2 to the last bit)" in text
    assert "1 refuse clearly, 0 differ, 0 fail." in text
    assert "1 of 2 programs with a model (50%)" in text
    assert "1 program trains its model" in text
    assert "7.5 times as long" in text
    assert "| `one` | equal | 96.0% | hooks 2 | 3.00 | 7.50 | 30 | 2.00 |" in text
    assert "- `three`: no such device" in text


def test_stats_are_none_when_the_run_printed_none() -> None:
    assert Run(0, 1.0, "", "no json here").stats is None


REFUSED = "Traceback (most recent call last):\n  File x\n{}: {}\n"


def reported(entry: Entry, remote: Run, folder: Path) -> Report:
    """The report of a program that saves a one, plainly and else."""

    def run(entry: Entry, results: Path) -> Run:
        assert entry.refusal is not None
        torch.save({"y": torch.ones(1)}, results)
        return Run(0, 1.0, "", "") if results.stem == "native" else remote

    return run_entry(entry, folder, run, run)


@pytest.mark.parametrize(
    ("raised", "words", "verdict", "right"),
    [
        ("torch_shim.errors.UnsupportedCall", "gpufaas: graphs", Verdict.REFUSED, True),
        ("torch_shim.errors.UnsupportedCall", "gpufaas: others", Verdict.REFUSED, False),
        ("RuntimeError", "CUDA has no graphs", Verdict.REFUSED, True),
        ("RuntimeError", "some other failure", Verdict.REFUSED, False),
        ("ValueError", "graphs", Verdict.FAILED, False),
    ],
)
def test_refusal_is_clear_when_it_is_our_error_or_that_of_cuda(
    raised: str, words: str, verdict: Verdict, right: object, tmp_path: Path
) -> None:
    entry = Entry("any", refusal="graphs", raises="RuntimeError")
    remote = Run(1, 1.0, "", REFUSED.format(raised, words))
    found = reported(entry, remote, tmp_path)
    assert (found.verdict, found.right) == (verdict, right)


def test_program_differs_when_it_runs_where_cuda_raises(tmp_path: Path) -> None:
    entry = Entry("any", refusal="same device", raises="RuntimeError")
    found = reported(entry, Run(0, 1.0, "", ""), tmp_path)
    assert found.verdict is Verdict.DIFFERENT
    assert not found.right


def test_rows_are_read_again_when_the_last_line_was_cut_off(tmp_path: Path) -> None:
    kept = tmp_path / "new" / "rows.jsonl"
    native, one, two = Run(0, 2.0, "", ""), Entry("one"), Entry("two")
    wrong = row_of(Report(one, Verdict.FAILED, native, found=("no",)))
    right = row_of(Report(one, Verdict.EQUAL, native, Run(0, 3.0, "", STATS)))
    for row in (wrong, right):
        add_row(kept, row)
    with kept.open("a", encoding="utf-8") as file:
        file.write(right.text()[:20])
    assert read_rows(kept) == {"one": right}
    assert in_order([two, one], read_rows(kept)) == [right]
    assert read_rows(tmp_path / "none") == {}


def test_batches_hold_programs_of_one_group_and_all_of_them() -> None:
    found = list(batches(ENTRIES))
    assert sorted(entry.name for batch in found for entry in batch) == sorted(
        entry.name for entry in ENTRIES
    )
    assert all(len({entry.group for entry in batch}) == 1 for batch in found)


def program(folder: Path, text: str) -> Entry:
    """A program that is not of the catalogue."""
    path = folder / "own.py"
    path.write_text(f"import sys, torch\n{text}\n", encoding="utf-8")
    return Entry(str(path.with_suffix("")))


@pytest.mark.timeout(180)
def test_forked_program_has_its_own_arguments_streams_and_exit_status(tmp_path: Path) -> None:
    ended = program(tmp_path, "print(sys.argv[1:]); sys.stderr.write('bad'); sys.exit(7)")
    with warm(Settings(limit_s=60), ("json",)) as run:
        found = run(ended, tmp_path / "results.pt")
    assert (found.status, found.errors) == (7, "bad")
    assert found.output == f"['{tmp_path / 'results.pt'}']\n"


@pytest.mark.timeout(180)
def test_forked_program_is_killed_when_it_takes_too_long(tmp_path: Path) -> None:
    endless = program(tmp_path, "import time; time.sleep(1000)")
    with warm_process(("json",)) as process:
        brief, patient = (Warm(process, Settings(limit_s=limit_s)) for limit_s in (1, 60))
        assert brief(endless, tmp_path / "results.pt").status == -9
        assert patient(program(tmp_path, "pass"), tmp_path / "results.pt").status == 0


@pytest.mark.timeout(180)
def test_program_has_failed_when_it_ends_the_process_it_was_forked_from(tmp_path: Path) -> None:
    with WarmRunner(Settings(limit_s=60), ("json",)) as run:
        killer = program(tmp_path, "import os; os.kill(os.getppid(), 9)")
        assert run(killer, tmp_path / "results.pt").status == -1
        assert run(program(tmp_path, "pass"), tmp_path / "results.pt").status == 0


@pytest.mark.timeout(180)
def test_warm_process_is_refused_when_a_library_cannot_be_imported() -> None:
    with pytest.raises(WarmProcessEnded), warm(Settings(), ("no_such_library",)):
        pass


def test_lanes_start_nothing_when_the_time_is_over(tmp_path: Path) -> None:
    assert not list(run_in_lanes(ENTRIES[:3], tmp_path, Settings(), lanes=1, within_s=-1))


def test_rows_are_lines_of_json() -> None:
    said = json.loads(Row("one", Verdict.EQUAL, right=True).text())
    assert (said["program"], said["verdict"], said["right"]) == ("one", "equal", True)


def test_page_is_written_when_every_entry_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, page_file = tmp_path / "rows.jsonl", tmp_path / "page.md"
    command = ["compat", "random_numbers", "tensor_arithmetic", "--resume", "--within", "0.000001"]
    monkeypatch.setattr("sys.argv", [*command, "--json", str(kept), "--write", str(page_file)])
    add_row(kept, Row("random_numbers", Verdict.EQUAL, right=True))
    main()
    assert not page_file.exists()
    add_row(kept, Row("tensor_arithmetic", Verdict.EQUAL, right=True))
    assert main() == 0
    assert "2 programs: 2 agree" in page_file.read_text("utf-8")


def test_rows_of_an_older_run_are_left_when_a_run_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "rows.jsonl"
    add_row(kept, Row("random_numbers", Verdict.EQUAL, right=True))
    command = ["compat", "random_numbers", "--within", "0.000001", "--json", str(kept)]
    monkeypatch.setattr("sys.argv", command)
    main()
    assert read_rows(kept) == {}
