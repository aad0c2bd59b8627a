"""The journals that the other tests believe: what is wrong in a log is found."""

import sys
from pathlib import Path

import pytest

from tests.kit.processes.daemons import Daemon
from tests.kit.processes.journals import Journal, unended

_GIVEN = (
    "2026-01-02 03:04:05,{:03} DEBUG gpu_manager.node.node: lease {} on n0/cpu:0 is granted to {}\n"
)
_ENDED = (
    "2026-01-02 03:04:05,{:03} DEBUG gpu_manager.node.node: lease {} on n0/cpu:0 has ended: idle\n"
)
_LOADED = (
    "2026-01-02 03:04:05,{:03} INFO gpu_manager.node.loading: "
    "bert was loaded on n0/cpu:0 in 0.1 s\n"
)


def test_journal_is_right_when_leases_follow_each_other() -> None:
    first = _GIVEN.format(1, 7, "r0") + _LOADED.format(2) + _ENDED.format(3, 7)
    journal = Journal.of([first + _GIVEN.format(3, 8, "r1, r2"), _LOADED.format(9)])
    assert journal.wrong == []
    assert [(each.lease, each.requests) for each in journal.in_force] == [(8, ("r1", "r2"))]
    assert journal.ended[7].at_s - journal.granted[7].at_s == pytest.approx(0.002, abs=1e-5)
    assert journal.resident == {("bert", "n0/cpu:0")}


@pytest.mark.parametrize(
    "log",
    [
        _GIVEN.format(1, 7, "r0") + _GIVEN.format(2, 8, "r1"),
        _GIVEN.format(1, 7, "r0") + _ENDED.format(2, 7) + _GIVEN.format(3, 7, "r0"),
        _GIVEN.format(1, 7, "r0") + _ENDED.format(2, 8),
    ],
    ids=["slot given twice", "lease given twice", "another one ended"],
)
def test_journal_is_wrong_when_its_node_cannot_have_been_right(log: str) -> None:
    assert len(Journal.of([log]).wrong) == 1


def test_model_came_back_when_it_was_loaded_twice_in_one_life() -> None:
    assert Journal.of([_LOADED.format(1), _LOADED.format(2)]).came_back == []
    assert len(Journal.of([_LOADED.format(1) + _LOADED.format(2)]).came_back) == 1


def test_leases_that_go_on_are_those_that_were_granted_and_have_not_ended() -> None:
    goes_on = _GIVEN.format(2, 8, "r1")
    log = _GIVEN.format(1, 7, "r0") + _ENDED.format(2, 7) + goes_on + _LOADED.format(3)
    assert unended(log) == goes_on
    assert Journal.of([unended(log) + _ENDED.format(4, 8)]).wrong == []


def test_log_is_cut_into_the_lives_of_its_daemon(tmp_path: Path) -> None:
    program = "import sys; print('up', sys.argv[1], flush=True)"
    daemon = Daemon([sys.executable, "-c", program, "a"], tmp_path / "log", "up")
    for _ in range(2):
        daemon.start()
        assert daemon.ended() == 0
    assert daemon.lives() == ["up a\n"] * 2
    assert daemon.lives(since=3, until=9) == ["a\n", "up a"]
    assert daemon.lives(since=5) == ["up a\n"]
    assert daemon.lives(since=10) == [""]
