"""Real processes, which stand still as long as their machine does."""

import pytest


@pytest.fixture(autouse=True)
def stops_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here replaces a process that is stopped, as frozen ones are replaced otherwise."""
    monkeypatch.setattr("common.liveness._STOPPED", "stopped")  # no state of /proc
