"""Requests to the scheduler for every GPU call: JSON over kept-alive connections."""

import json
from collections.abc import Mapping
from urllib.parse import urlsplit

from common.errors import NoResponse
from common.http.client import HttpClient, HttpConnection
from common.telemetry.traces import TRACEPARENT, TRACESTATE

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_PORT = 80
_TRACE = (TRACEPARENT, TRACESTATE)


class Posting:
    """The `Post` of a SchedulerClient; supports plain HTTP only, as inside a cluster."""

    def __init__(self, client: HttpClient | None = None) -> None:
        self._client = HttpClient() if client is None else client
        self._where: dict[str, tuple[str, bytes]] = {}

    async def __call__(
        self, url: str, headers: Mapping[str, str], fields: Mapping[str, object]
    ) -> tuple[int, bytes]:
        """The response's status and body; ConnectionError if there is none."""
        address, head = self._where.get(url) or self._found(url, headers)
        body = _ENCODE(fields).encode()
        size = b"%d\r\n%b" % (len(body), _trace(headers))
        try:
            connection = self._client.idle(address)
            if connection is None:
                connection = await self._client.connect(address)
            return await _asked(connection, b"%b%b\r\n%b" % (head, size, body))
        except NoResponse as error:
            raise ConnectionError(f"the scheduler broke off: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _found(self, url: str, headers: Mapping[str, str]) -> tuple[str, bytes]:
        """The address of a URL, and the request's head up to the length of the body.

        The trace headers differ in each request and follow the length.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url} is no URL of plain HTTP")
        lines = [f"POST {parts.path} HTTP/1.1", f"host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items() if name not in _TRACE]
        lines += ["content-type: application/json", "content-length: "]
        address = f"tcp:{parts.hostname}:{parts.port or _PORT}"
        found = self._where[url] = address, "\r\n".join(lines).encode("latin-1")
        return found


def _trace(headers: Mapping[str, str]) -> bytes:
    found = [f"{name}: {headers[name]}\r\n" for name in _TRACE if name in headers]
    return "".join(found).encode("latin-1")


async def _asked(connection: HttpConnection, data: bytes) -> tuple[int, bytes]:
    try:
        await connection.ask(data)
        body = connection.take()
        while not connection.complete:
            if not connection.readable:
                await connection.more()
            body += connection.take()
        return connection.status, body
    finally:
        connection.let_go()
