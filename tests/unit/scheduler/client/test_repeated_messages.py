"""What callers tell the next leader once more, and for how long they remember it."""

from types import SimpleNamespace

import pytest

from scheduler.client import lease_client
from scheduler.client.lease_client import LeaseClient
from scheduler.model.values import LeaseId, Request, RequestId
from scheduler.wire.caller_stream import Cancel, GiveBack

R0, R1 = RequestId("r0"), RequestId("r1")
BACK = GiveBack(LeaseId(1), R0)


class Led(LeaseClient):
    """A client that some leader hears until a time of the test's own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now_s: float) -> None:
        self.now_s: float = now_s
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(lease_client, "time", clock)
        super().__init__(["http://nobody"], "")
        self._without_leader_s = now_s

    def ask_for(self, request: RequestId) -> int:
        return self.ask(Request(request, "t/f", ()), None, lambda _: None)

    def change_its_mind(self, request: RequestId) -> None:
        self.withdraw(self.ask_for(request))

    def repeated(self, led_until_s: float) -> list[GiveBack | Cancel]:
        """What a leader hears that is found now."""
        self._without_leader_s = led_until_s
        self._forget_said()
        return list(self._said_s)


@pytest.mark.parametrize(("later_s", "kept"), [(0.0, 2), (11.9, 2), (12.1, 0)])
def test_messages_are_kept_until_their_leader_must_have_acted_on_them(
    later_s: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Led(monkeypatch, 100.0)
    client.release(LeaseId(1), R0)
    client.change_its_mind(R1)
    assert client.repeated(100.0 + later_s) == [BACK, Cancel(R1)][:kept]


def test_messages_are_kept_for_as_long_as_there_is_no_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Led(monkeypatch, 100.0)
    client.release(LeaseId(1), R0)
    client.now_s = 500.0
    client.change_its_mind(R1)
    assert client.repeated(100.0) == [BACK, Cancel(R1)]


def test_request_that_is_asked_again_is_not_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Led(monkeypatch, 100.0)
    client.release(LeaseId(1), R0)
    client.change_its_mind(R1)
    client.ask_for(R1)
    assert client.repeated(100.0) == [BACK]


def test_request_that_is_cancelled_twice_counts_from_the_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Led(monkeypatch, 100.0)
    client.change_its_mind(R1)
    client.now_s = 101.0
    client.change_its_mind(R0)
    client.now_s = 110.0
    client.change_its_mind(R1)
    assert client.repeated(120.0) == [Cancel(R1)]


def test_first_messages_are_forgotten_when_there_are_very_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Led(monkeypatch, 0.0)
    client.release(LeaseId(1), R0)
    for number in range(5000):
        client.release(LeaseId(number))
        client.change_its_mind(RequestId(f"x{number}"))
    messages = client.repeated(0.0)
    assert len(messages) == 8000
    assert BACK not in messages
