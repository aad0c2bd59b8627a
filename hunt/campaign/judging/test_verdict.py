"""The campaign's judgement of calls: what is lost, doubled, broken off or wrong is found."""

import json
from itertools import count
from pathlib import Path

import pytest

from hunt.campaign.judging.call_journal import (
    CallbackSeen,
    CallJournal,
    Ending,
    Kind,
    WatchedCall,
    most_at_once,
)
from hunt.campaign.judging.verdict import Excuse, violations

_FAULT_S, _HEALED_S = 10.0, 20.0
_NO_EXCUSE = Excuse(frozenset(), _FAULT_S, _HEALED_S)
_STREAMS = Excuse(frozenset({Kind.STREAM}), _FAULT_S, _HEALED_S)
_RESULT = CallbackSeen(13.0, 200, right=True, said="8")


def call(
    kind: Kind = Kind.SYNC,
    ending: Ending | None = Ending.RIGHT,
    began_s: float = 11.0,
    ended_s: float | None = 12.0,
    *callbacks: CallbackSeen,
) -> WatchedCall:
    ended_s = None if ending is None else ended_s
    return WatchedCall("c0", kind, began_s, ended_s, ending, callbacks=[*callbacks])


def found(it: WatchedCall, executed: int = 1, excuse: Excuse = _NO_EXCUSE) -> list[str]:
    return [text.partition(":")[0] for text in violations([it], {"c0": executed}, excuse)]


@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SYNC, Kind.STREAM])
def test_nothing_is_wrong_when_a_call_was_answered_or_refused_once(kind: Kind) -> None:
    assert found(call(kind)) == []
    assert found(call(kind, Ending.STATED), executed=0) == []
    assert found(call(kind, Ending.UNREACHABLE), executed=0) == []


def test_nothing_is_wrong_when_an_async_call_was_made_and_called_back_twice() -> None:
    twice = call(Kind.ASYNC, Ending.RIGHT, 11.0, 12.0, _RESULT, _RESULT)
    assert found(twice, executed=2) == []


@pytest.mark.parametrize("ending", [None, Ending.LATE])
def test_call_is_lost_when_neither_answer_nor_error_came(ending: Ending | None) -> None:
    (text,) = found(call(ending=ending))
    assert text.startswith("lost, ")


def test_async_call_is_lost_when_it_was_accepted_and_never_called_back() -> None:
    assert found(call(Kind.ASYNC)) == ["lost, accepted and never called back"]


@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SYNC, Kind.STREAM])
def test_call_is_doubled_when_a_function_began_it_twice(kind: Kind) -> None:
    assert found(call(kind), executed=2) == ["doubled, executed 2 times"]
    assert found(call(kind, Ending.STATED), executed=2) == ["doubled, executed 2 times"]


def test_call_of_an_earlier_round_is_doubled_when_it_is_executed_once_more() -> None:
    begun_since = {"sync-1": 2, "plain-2": 1, "async-3": 2, "a-stranger": 2}
    (text,) = violations([], begun_since, _NO_EXCUSE)
    assert text == "doubled, executed 2 times: sync-1, of an earlier round"


def test_answer_of_a_call_that_was_never_executed_is_found() -> None:
    assert found(call(), executed=0) == ["answered although no function executed it"]


def test_wrong_answer_and_wrong_result_are_found() -> None:
    assert found(call(ending=Ending.WRONG)) == ["answered wrongly"]
    wrong = CallbackSeen(13.0, 200, right=False, said="9")
    given_up = CallbackSeen(13.0, 502, right=False, said="")
    seen = call(Kind.ASYNC, Ending.RIGHT, 11.0, 12.0, _RESULT, wrong, given_up)
    assert found(seen) == ["called back with a wrong result", "given up with status 502"]


@pytest.mark.parametrize("ending", [Ending.STATED, Ending.UNREACHABLE])
def test_refused_async_call_is_wrong_when_it_was_made_all_the_same(ending: Ending) -> None:
    assert found(call(Kind.ASYNC, ending, 11.0, 12.0, _RESULT)) == ["made, although it was refused"]


@pytest.mark.parametrize(("began_s", "ended_s"), [(9.0, 10.5), (15.0, 16.0), (19.5, 21.0)])
def test_call_may_break_off_when_its_kind_was_hit_within_the_fault(
    began_s: float, ended_s: float
) -> None:
    broken = call(Kind.STREAM, Ending.BROKEN, began_s, ended_s)
    assert found(broken, excuse=_STREAMS) == []
    assert found(broken) == ["broken off without a stated error"]


@pytest.mark.parametrize(("began_s", "ended_s"), [(8.0, 9.0), (20.5, 21.0)])
def test_call_may_not_break_off_when_it_was_over_before_or_began_after_the_fault(
    began_s: float, ended_s: float
) -> None:
    broken = call(Kind.STREAM, Ending.BROKEN, began_s, ended_s)
    assert found(broken, excuse=_STREAMS) == ["broken off without a stated error"]


def test_journal_writes_every_change_and_lets_a_call_end_once(tmp_path: Path) -> None:
    ticks = count(1)
    with CallJournal(tmp_path / "calls", clock=lambda: float(next(ticks))) as journal:
        journal.begin(Kind.ASYNC, "c0")
        journal.end("c0", Ending.RIGHT, 202)
        (it,) = journal.calls()
        assert [one.id for one in journal.calls() if one.under_way] == ["c0"]
        assert journal.call_back("c0", status=200, right=True, said="8")
        assert [one.id for one in journal.calls() if one.under_way] == []
        assert it.served_s == 3.0
        assert not journal.call_back("c1", status=200, right=True, said="8")
        with pytest.raises(AssertionError, match="ended twice"):
            journal.end("c0", Ending.RIGHT)
    written = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [line["what"] for line in written] == ["began", "ended", "called back"]


def test_calls_at_once_are_those_that_overlap_until_they_are_called_back() -> None:
    assert most_at_once([]) == 0
    one_after_the_other = [call(began_s=1.0, ended_s=2.0), call(began_s=2.0, ended_s=3.0)]
    assert most_at_once(one_after_the_other) == 1
    promised = call(Kind.ASYNC, Ending.RIGHT, 11.0, 11.1, _RESULT)
    assert most_at_once([promised, call(began_s=12.5), call(began_s=12.6, ending=None)]) == 2
    assert most_at_once([promised, call(began_s=12.0, ended_s=14.0)]) == 2
