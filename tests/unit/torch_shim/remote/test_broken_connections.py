"""How often a call is repeated when connections break."""

import pytest

from torch_shim.errors import ConnectionLost, RemoteFailure
from torch_shim.remote.broken_connections import BrokenConnections

LOST = ConnectionLost("broken pipe")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("torch_shim.remote.broken_connections.time.sleep", found.append)
    return found


def test_call_fails_when_two_workers_are_lost() -> None:
    broken = BrokenConnections()
    broken.of_worker("a", LOST)
    with pytest.raises(RemoteFailure, match="broke 2 times"):
        broken.of_worker("b", LOST)


def test_a_worker_whose_end_is_not_seen_yet_is_one_crash(pauses: list[float]) -> None:
    broken = BrokenConnections()
    for _ in range(20):
        broken.of_worker("a", LOST)
    assert broken.crashes == 1
    assert len(pauses) == 19
    with pytest.raises(RemoteFailure):
        broken.of_worker("a", LOST)
