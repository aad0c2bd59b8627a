"""What `gpufaas top` makes of events that cannot be read."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, cast

import pytest

from gpufaas.remote.gateway_api import GatewayApi
from gpufaas.remote.http_request import http_url
from gpufaas.top.live_state import EventReader
from tests.kit.waiting import wait_until

STATE: Any = {"queue": 1, "gpus": [{"id": "g0"}]}


def an_event(kind: str, data: bytes, event_id: str) -> bytes:
    return b"event: %b\ndata: %b\nid: %b\n\n" % (kind.encode(), data, event_id.encode())


class Answer(BytesIO):
    status = 200


class FakeGateway(GatewayApi):
    """Each stream is the next of these; the stream after the last one stays silent."""

    def __init__(self, *streams: bytes) -> None:
        super().__init__(http_url("http://gateway", "gateway"), "")
        self.streams = list(streams)
        self.asked: list[dict[str, str]] = []
        self.over = threading.Event()

    @contextmanager
    def call(self, method: str, path: str, *_: Any, **options: Any) -> Iterator[Any]:
        assert (method, path, options["longest_silence_s"]) == ("GET", "/ui/events", 15.0)
        self.asked.append(options["headers"])
        if self.streams:
            yield cast("Any", Answer(self.streams.pop(0)))
        else:
            self.over.wait()
            yield cast("Any", Answer())


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
def test_state_is_requested_again_when_an_event_cannot_be_read(kind: str, data: bytes) -> None:
    whole = an_event("state", json.dumps(STATE).encode(), "e1")
    gateway = FakeGateway(whole + an_event(kind, data, "e2"))
    seen: list[tuple[Any, str]] = []
    reader = EventReader(gateway, lambda: seen.append(reader.latest()), pause_s=0.01)
    reader.start()
    try:
        wait_until(lambda: len(gateway.asked) == 2, "second reading")
        assert seen[0] == (STATE, "")
        assert seen[1][0] == STATE
        assert seen[1][1].startswith("an event cannot be read: ")
        assert gateway.asked == [{}, {}]  # no Last-Event-ID: the whole state is wanted
    finally:
        reader.stop()
        gateway.over.set()
