"""Clients here wait as long as a test does: a machine that does much else is no silent scheduler.

Tests of what is silent set shorter times.
"""

import pytest

from scheduler.client import lease_client, operator_client
from scheduler.service.streams import callers
from tests.kit.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (lease_client, "GREETING_S"),
        (lease_client, "SILENCE_S"),
        (callers, "GREETING_S"),
        (operator_client, "_ANSWERED_S"),
        (operator_client, "_CONNECT_S"),
    ):
        monkeypatch.setattr(module, name, PATIENCE_S)
