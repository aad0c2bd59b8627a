"""What callers tell the next leader once more, and for how long they remember it."""

import pytest

from scheduler.client.lease_client import RepeatedMessages
from scheduler.model.values import LeaseId, RequestId
from scheduler.wire.caller_stream import Cancel, GiveBack

R0, R1 = RequestId("r0"), RequestId("r1")
BACK = GiveBack(LeaseId(1), R0)


def said(at_s: float) -> RepeatedMessages:
    repeated = RepeatedMessages()
    repeated.say(BACK, at_s)
    repeated.say(Cancel(R1), at_s)
    return repeated


@pytest.mark.parametrize(("later_s", "kept"), [(0.0, 2), (11.9, 2), (12.1, 0)])
def test_messages_are_kept_until_their_leader_must_have_acted_on_them(
    later_s: float, kept: int
) -> None:
    repeated = said(100.0)
    repeated.forget(100.0 + later_s)
    assert list(repeated) == [BACK, Cancel(R1)][:kept]


def test_request_that_is_asked_again_is_not_cancelled_again() -> None:
    repeated = said(100.0)
    repeated.asked(R1)
    assert list(repeated) == [BACK]


def test_request_that_is_cancelled_twice_counts_from_the_second_time() -> None:
    repeated = said(100.0)
    repeated.say(Cancel(R0), 101.0)
    repeated.say(Cancel(R1), 110.0)
    repeated.forget(120.0)
    assert list(repeated) == [Cancel(R1)]


def test_first_messages_are_forgotten_when_there_are_very_many() -> None:
    repeated = said(0.0)
    for number in range(5000):
        repeated.say(GiveBack(LeaseId(number)), 0.0)
        repeated.say(Cancel(RequestId(f"x{number}")), 0.0)
    messages = list(repeated)
    assert len(messages) == 8000
    assert BACK not in messages
