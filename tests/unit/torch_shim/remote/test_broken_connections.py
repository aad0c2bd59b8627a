"""How often a call is repeated when connections break."""

import pytest

from torch_shim.errors import ConnectionLost, GpuUnavailable, ManagerUnreachable, RemoteFailure
from torch_shim.raised_failures import error_of
from torch_shim.remote.program import Tries

LOST = ConnectionLost("broken pipe")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("torch_shim.remote.program.time.sleep", found.append)
    return found


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr("torch_shim.remote.program.time.monotonic", lambda: now_s[-1])
    return now_s


def test_call_fails_when_two_workers_are_lost_one_after_the_other(clock: list[float]) -> None:
    tries = Tries()
    tries.lose_worker("a", LOST)
    clock.append(101.0)
    with pytest.raises(RemoteFailure, match="broke 2 times") as raised:
        tries.lose_worker("b", LOST)
    assert not isinstance(error_of(raised.value), GpuUnavailable), "it may be what ends workers"


def test_two_workers_that_are_lost_together_are_one_crash_but_three_are_two(
    clock: list[float], pauses: list[float]
) -> None:
    tries = Tries()
    tries.lose_worker("a", LOST)
    clock.append(100.02)
    tries.lose_worker("b", LOST)
    assert tries.crashes == 1
    assert pauses == [0.5], "whatever ended both may not be over"
    with pytest.raises(RemoteFailure):
        tries.lose_worker("c", LOST)


def test_a_worker_whose_end_is_not_seen_yet_is_one_crash(
    clock: list[float], pauses: list[float]
) -> None:
    tries = Tries()
    for _ in range(20):
        tries.lose_worker("a", LOST)
    assert tries.crashes == 1
    assert len(pauses) == 19
    clock.append(101.0)
    with pytest.raises(RemoteFailure):
        tries.lose_worker("a", LOST)


def test_manager_that_is_lost_with_its_worker_is_not_a_second_crash() -> None:
    tries = Tries()
    tries.lose_worker("a", LOST)
    tries.lose_manager(LOST)
    assert tries.crashes == 1


def test_call_may_be_made_again_when_its_manager_was_lost_twice() -> None:
    tries = Tries()
    tries.lose_manager(LOST)
    with pytest.raises(RemoteFailure, match="lost 2 times") as raised:
        tries.lose_manager(LOST)
    assert isinstance(error_of(raised.value), GpuUnavailable)


def test_error_names_the_manager_that_cannot_be_reached_after_a_crash() -> None:
    tries, away = Tries(), ManagerUnreachable("unix:/node.sock", "refused")
    tries.lose_worker("a", LOST)
    tries.lose_manager(away)
    with pytest.raises(ManagerUnreachable) as raised:
        tries.lose_manager(away)
    assert raised.value is away
