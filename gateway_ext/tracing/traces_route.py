"""GET /system/traces: the latest calls; GET /system/traces/CALL_ID: all spans of one."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from common.http.asgi import Receive, Scope, Send, send_response, send_text
from common.telemetry.traces import plain_span
from gateway_ext.tracing.call_tracer import CallTracer

PATH = "/system/traces"

_JSON = ((b"content-type", b"application/json"),)
_LATEST = 100
_NOT_ALLOWED, _NOT_FOUND = 405, 404


class TraceRoutes:
    """The ASGI application of both routes."""

    def __init__(self, tracer: CallTracer) -> None:
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        del receive
        if scope["method"] not in {"GET", "HEAD"}:
            await send_text(send, _NOT_ALLOWED, "GET is expected", [(b"allow", b"GET, HEAD")])
            return
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        call_id = unquote(raw.decode("latin-1").removeprefix(PATH).strip("/"))
        if not call_id:
            latest = {"calls": self._tracer.latest(_LATEST)}
            await send_response(send, 200, _json(latest | self._memory()), _JSON)
            return
        spans = self._tracer.spans(call_id)
        if not spans:
            await send_response(send, _NOT_FOUND, _json(self._unknown(call_id)), _JSON)
            return
        found = {"call_id": call_id, "spans": [plain_span(span) for span in spans]}
        await send_response(send, 200, _json(found | self._memory()), _JSON)

    def _memory(self) -> dict[str, Any]:
        return {"memory": self._tracer.remembered()._asdict()}

    def _unknown(self, call_id: str) -> Mapping[str, Any]:
        calls, most, since_s = self._tracer.remembered()
        ago = "" if since_s is None else f", the oldest of which came {since_s:.0f} s ago"
        message = (
            f"call {call_id} is unknown: this gateway remembers {calls} calls{ago} "
            f"(at most {most} plain ones and {most} others), and none from before its start"
        )
        return {"error": "unknown", "message": message} | self._memory()


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()
