"""What `gpufaas top` makes of events that cannot be read."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, cast

import pytest

from gpufaas.gateway_remote import GatewayRemote
from gpufaas.top import watching
from gpufaas.top.watching import Watching
from tests.runtime_process import wait_until

STATE: Any = {"queue": 1, "gpus": [{"id": "g0"}]}


def an_event(kind: str, data: bytes, event_id: str) -> bytes:
    return b"event: %b\ndata: %b\nid: %b\n\n" % (kind.encode(), data, event_id.encode())


class FakeGateway(GatewayRemote):
    """Each reading is the next of these; behind the last one nothing comes."""

    def __init__(self, *streams: bytes) -> None:
        super().__init__("http://gateway", "")
        self.streams = list(streams)
        self.asked: list[dict[str, str]] = []
        self.over = threading.Event()

    @contextmanager
    def reading(self, path: str, within_s: float, **headers: str) -> Iterator[Any]:
        assert (path, within_s) == ("/ui/events", 15.0)
        self.asked.append(headers)
        if self.streams:
            yield cast("Any", BytesIO(self.streams.pop(0)))
        else:
            self.over.wait(20)
            yield cast("Any", BytesIO())


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("change", b"{no json"),
        ("change", b"\xff"),
        ("change", b"[]"),
        ("state", b"5"),
        ("change", b'{"gpus": {"replaced": []}}'),
        ("change", b'{"gpus": null}'),
        ("change", b'{"gpus": {"removed": [], "replaced": [{}]}}'),
        ("change", b'{"history": {"added": []}}'),
    ],
)
def test_state_is_not_fresh_and_asked_for_anew_when_an_event_cannot_be_read(
    kind: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_PAUSE_S", 0.01)
    whole = an_event("state", json.dumps(STATE).encode(), "e1")
    gateway = FakeGateway(whole + an_event(kind, data, "e2"))
    seen: list[tuple[Any, str]] = []
    watched = Watching(gateway, lambda: seen.append(watched.seen()))
    watched.start()
    try:
        wait_until(lambda: len(gateway.asked) == 2, "second reading")
        assert seen[0] == (STATE, "")
        assert seen[1][0] == STATE
        assert seen[1][1].startswith("an event cannot be read: ")
        assert gateway.asked == [{}, {}]  # no Last-Event-ID: the whole state is wanted
    finally:
        watched.stop()
        gateway.over.set()
