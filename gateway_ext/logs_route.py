"""GET /system/logs: a function's lines as JSON lines, for as long as somebody reads them."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import parse_qs

from gateway_ext import names, wire
from gateway_ext.asgi import Receive, Scope, Send, first_of, left, say
from gateway_ext.errors import BadRequest, GatewayError
from gateway_ext.model import LogLine
from gateway_ext.ports import LogQuery, Provider
from gateway_ext.refusals import headers_of, status_of

_NDJSON = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
_UNPROCESSABLE, _NOT_ALLOWED = 422, 405
_TRUE = frozenset({"1", "t", "true"})


class Logs:
    """Sends lines as they come; ends with the reader, or when the gateway closes."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._closing = asyncio.Event()

    def close(self) -> None:
        """Nobody follows any more."""
        self._closing.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; what is wrong is said before the first line."""
        if scope["method"] not in {"GET", "HEAD"}:
            await say(send, _NOT_ALLOWED, "GET is wanted", [(b"allow", b"GET, HEAD")])
            return
        try:
            query = _query(scope)
        except BadRequest as error:
            await say(send, _UNPROCESSABLE, str(error))
            return
        try:
            await self._provider.function(query.function, usage=False)
        except GatewayError as error:
            await say(send, status_of(error), str(error), headers_of(error))
            return
        await send({"type": "http.response.start", "status": 200, "headers": _NDJSON})
        # What is already written goes out at once, also where no line follows for a long time.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        if scope["method"] == "GET":
            await first_of(self._send_lines(query, send), left(receive), self._closing.wait())
        await send({"type": "http.response.body", "body": b""})

    async def _send_lines(self, query: LogQuery, send: Send) -> None:
        lines = self._provider.logs(query)
        try:
            async for line in lines:
                part = wire.log_line(line)
                await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            await _close(lines)


async def _close(lines: AsyncIterator[LogLine]) -> None:
    """A generator that waits for a line ends here, not when it is collected."""
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
        tail = int(sent.get("tail") or 0)
        after = wire.time_of(since) if since else None
    except ValueError as error:
        raise BadRequest(f"tail is a number, since a time of RFC 3339: {error}") from error
    return LogQuery(
        function=names.function_id(sent.get("name", ""), sent.get("namespace", "")),
        instance=sent.get("instance", ""),
        tail=tail if tail > 0 else None,
        since=after,
        follow=sent.get("follow", "").lower() in _TRUE,
    )
