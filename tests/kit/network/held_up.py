"""A process that gets no processor between two requests that it sends."""

import time

import pytest

from scheduler.model.values import Request
from scheduler.wire.request_times import relative

_HELD_UP_S = 0.03


def hold_up_between_requests(monkeypatch: pytest.MonkeyPatch, sender: str) -> None:
    """Hold the process up behind each request that this module makes a message of."""

    def slowly(request: Request, asked_s: float, now_s: float) -> Request:
        sent = relative(request, asked_s, now_s)
        time.sleep(_HELD_UP_S)
        return sent

    monkeypatch.setattr(f"{sender}.relative", slowly)
