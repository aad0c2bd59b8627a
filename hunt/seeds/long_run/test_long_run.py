"""Long runs of seeds: what is missing, what failed, what is written, whatever cuts them off."""

import os
import signal
from pathlib import Path

import pytest

from hunt.seeds.long_run import block_processes, block_record, seed_file, seed_table
from hunt.seeds.long_run.block_record import PLAIN, BackAgain, BlockRecord, FailedSeed


def block(
    seeds: range, commit: str = "abc", *, failed: dict[int, str] | None = None
) -> BlockRecord:
    """The record of these seeds, of which some failed; the others were back after a second each."""
    wrong = [FailedSeed(seed, (text,)) for seed, text in (failed or {}).items()]
    back = [BackAgain(seed, 1.0, "f0") for seed in seeds if seed not in (failed or {})]
    return BlockRecord(
        commit,
        seeds.start,
        len(seeds),
        took_s=1.0,
        calls=5,
        answered=4,
        events=9,
        virtual_s=3600.0,
        drawn={"x": 1},
        back={PLAIN: back},
        failed=wrong,
    )


def test_run_goes_on_where_it_was_cut_off_in_the_middle_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "out" / "seeds.jsonl"
    assert seed_file.read(file) == []
    seed_file.append(file, block(range(1, 21)))
    with file.open("a") as out:
        out.write('{"commit":"abc","fir')
    assert [each.seeds for each in seed_file.read(file)] == [range(1, 21)]
    seed_file.append(file, block(range(41, 46)))
    assert [each.seeds for each in seed_file.read(file)] == [range(1, 21), range(41, 46)]


def test_missing_seeds_are_run_in_blocks() -> None:
    records = [block(range(1, 21)), block(range(41, 46))]
    left = seed_file.missing(records, range(1, 61))
    assert seed_file.runs(left) == [range(21, 41), range(46, 61)]
    assert list(seed_file.blocks(left)) == [range(21, 41), range(46, 61)]
    assert list(seed_file.blocks(range(1, 46))) == [range(1, 21), range(21, 41), range(41, 46)]


def test_seed_that_passes_later_fails_no_more_and_is_told() -> None:
    records = [
        block(range(1, 21), failed={3: "three", 7: "seven"}),
        block(range(3, 4), "def"),
        block(range(7, 8), "def", failed={7: "again"}),
    ]
    assert {seed: each[0] for seed, each in seed_file.last_failures(records).items()} == {7: "def"}
    page = "\n".join(seed_table.lines(records, "make seeds", "2026-01-01"))
    assert "- seed 7 at def: again" in page
    assert "- seed 3 at abc, not at def: three" in page
    assert "| abc | 1-20 | 20 | 2 |" in page
    assert "| def | 3, 7 | 2 | 1 |" in page
    assert "| not overloaded | 19 | 1.00 s | 1.00 s | 1.00 s | 1.00 s | 0 (0.00 %) |" in page


def test_record_is_read_as_it_was_written() -> None:
    record = block(range(5, 8), failed={6: "six"})
    assert block_record.read_line(record.as_line()) == record


def _run_unless_third(commit: str, seeds: range) -> BlockRecord:
    if 3 in seeds:
        os.kill(os.getpid(), signal.SIGKILL)
    return block(seeds, commit)


def test_seeds_of_a_process_that_dies_fail_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_processes, "run_block", _run_unless_third)
    found = list(block_processes.records_of("abc", [range(n, n + 1) for n in range(1, 7)], 2))
    assert sorted(each.first for each in found) == [1, 2, 3, 4, 5, 6]
    failed = {each.first for each in found if each.failed}
    assert 3 in failed, "it killed its process"
    assert failed <= {1, 2, 3}, "those before it may have run beside it; whatever follows runs"


def test_a_real_block_counts_what_was_drawn() -> None:
    record = block_record.run_block("abc", range(1, 3))
    assert record.calls
    assert sum(times for what, times in record.drawn.items() if what.startswith("policy")) == 2
    assert not record.failed


def test_seed_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(_: int) -> None:
        while True:
            pass

    monkeypatch.setattr(block_record, "run_seed", endless)
    monkeypatch.setattr(block_record, "_LONGEST_S", 0.05)
    (failed,) = block_record.run_block("abc", range(1, 2)).failed
    assert "the processor's time" in failed.violations[0]
