"""GET /system/logs: a function's log as JSON lines, until the client disconnects."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import parse_qs

from common.http.asgi import Receive, Scope, Send, send_text, until_disconnected
from common.numerals import whole
from common.tasks import until_first
from gateway_ext.error_statuses import headers_of, status_of
from gateway_ext.errors import BadRequest, GatewayError
from gateway_ext.model import LogLine
from gateway_ext.openfaas import openfaas_json, valid_names
from gateway_ext.ports import LogQuery, Provider

_NDJSON = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
_UNPROCESSABLE, _NOT_ALLOWED = 422, 405
_LINES_OF_A_TURN = 64
_TRUE = frozenset({"1", "t", "true"})


class Logs:
    """Sends log lines as they arrive; ends with the reader, or when the gateway closes."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End every response that follows a log."""
        self._closing.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; an error is sent before the first line."""
        if scope["method"] not in {"GET", "HEAD"}:
            await send_text(send, _NOT_ALLOWED, "GET is expected", [(b"allow", b"GET, HEAD")])
            return
        try:
            query = _query(scope)
        except BadRequest as error:
            await send_text(send, _UNPROCESSABLE, str(error))
            return
        try:
            await self._provider.function(query.function, usage=False)
        except GatewayError as error:
            await send_text(send, status_of(error), str(error), headers_of(error))
            return
        await send({"type": "http.response.start", "status": 200, "headers": _NDJSON})
        # Lines already written are sent at once, even if none follows for a long time.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        if scope["method"] == "GET":
            await until_first(
                self._send_lines(query, send), until_disconnected(receive), self._closing.wait()
            )
        await send({"type": "http.response.body", "body": b""})

    async def _send_lines(self, query: LogQuery, send: Send) -> None:
        lines = self._provider.logs(query)
        try:
            sent = 0
            async for line in lines:
                part = openfaas_json.log_line(line)
                await send({"type": "http.response.body", "body": part, "more_body": True})
                sent += 1
                if sent % _LINES_OF_A_TURN == 0:  # thousands of stored lines need no waiting
                    await asyncio.sleep(0)
        finally:
            await _close(lines)


async def _close(lines: AsyncIterator[LogLine]) -> None:
    """End a generator that waits for a line now, instead of at its garbage collection."""
    close = getattr(lines, "aclose", None)
    if close is not None:
        await close()


def _query(scope: Scope) -> LogQuery:
    sent = {
        name: values[-1]
        for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()
    }
    since = sent.get("since")
    try:
        tail = whole(sent.get("tail") or "0")
        after = openfaas_json.time_of(since) if since else None
    except ValueError as error:
        raise BadRequest(f"tail is a number, since a time of RFC 3339: {error}") from error
    return LogQuery(
        function=valid_names.function_id(sent.get("name", ""), sent.get("namespace", "")),
        instance=sent.get("instance", ""),
        tail=tail if tail > 0 else None,
        since=after,
        follow=sent.get("follow", "").lower() in _TRUE,
    )
