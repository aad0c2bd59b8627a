"""The campaign's records: which rounds a later run leaves out, and what the figures of all say."""

from dataclasses import replace
from pathlib import Path

from hunt.campaign import recovery_table, round_records
from hunt.campaign.judging.call_journal import Kind
from hunt.campaign.round_records import RoundRecord, Seconds

_SERVED: Seconds = dict.fromkeys(Kind, 0.5)
_RIGHT = RoundRecord(
    *("up", "etcd-kill", 0, 1, "2026-01-02T03:04:05+00:00", "c0ffee00", 1.5),
    from_fault_s=_SERVED,
    from_heal_s=_SERVED,
    gap_s=_SERVED,
    endings={"plain right": 7, "sync right": 7, "async stated": 1},
)
_WRONG = replace(_RIGHT, number=1, violations=["lost"])


def _done(records: list[RoundRecord], commit: str, *, only_here: bool = False) -> set[int]:
    names = round_records.done(records, seed=1, commit=commit, only_here=only_here)
    return {number for _, _, number in names}


def test_records_are_read_as_they_were_kept_and_without_what_older_ones_lack(
    tmp_path: Path,
) -> None:
    file = tmp_path / "out" / "rounds"
    assert round_records.read(file) == []
    for record in (_RIGHT, _WRONG):
        round_records.append(file, record)
    with file.open("a") as out:
        out.write('{"world": "up", "fault": "f", "number": 2, "seed": 1, "at": "then"}\n')
    assert round_records.read(file) == [_RIGHT, _WRONG, RoundRecord("up", "f", 2, 1, "then")]


def test_right_rounds_are_not_made_again_on_other_commits_and_wrong_ones_are() -> None:
    rounds = [_RIGHT, _WRONG]
    assert _done(rounds, "c0ffee00") == {0, 1}
    assert _done(rounds, "facade00") == {0}
    assert _done(rounds, "facade00", only_here=True) == set()
    assert _done([replace(_RIGHT, seed=2)], "c0ffee00") == set()


def test_wrong_round_is_made_again_when_files_differ_from_the_commit() -> None:
    assert _done([replace(_WRONG, commit="c0ffee00+")], "c0ffee00+") == set()


def test_figures_are_those_of_every_fault_on_every_commit() -> None:
    elsewhere = replace(_RIGHT, number=2, commit="facade00", load=None)
    first, second = recovery_table.summaries([_RIGHT, elsewhere, _WRONG])
    assert (first["commit"], first["rounds"], first["calls"]) == ("c0ffee00", 2, 30)
    assert first["endings"] == {"plain right": 14, "sync right": 14, "async stated": 2}
    assert first["gap_s"][Kind.SYNC] == [0.5, 0.5]
    assert (first["violations"], second["violations"]) == (["lost"], [])
    assert (second["commit"], second["rounds"], second["load"]) == ("facade00", 1, [None])


def test_percentile_is_the_greatest_of_few_and_the_last_but_one_of_a_hundred() -> None:
    assert recovery_table.percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert recovery_table.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert recovery_table.percentile(map(float, range(100)), 0.99) == 98.0
