"""The way to the scheduler on every GPU call: JSON over kept-alive connections of our own."""

import json
from collections.abc import Mapping
from urllib.parse import urlsplit

from gateway_ext.errors import Unreachable
from gateway_ext.limits import InvokeSettings
from gateway_ext.model import FunctionId
from gateway_ext.upstream_http import Client, Connection

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_SCHEDULER = FunctionId("", "scheduler")
_PORT = 80


class Posting:
    """Posts for a `scheduler.client.SchedulerClient`; plain HTTP alone, as inside a cluster."""

    def __init__(self, client: Client | None = None) -> None:
        self._client = Client(InvokeSettings()) if client is None else client
        self._where: dict[str, tuple[str, bytes]] = {}

    async def __call__(
        self, url: str, headers: Mapping[str, str], fields: Mapping[str, object]
    ) -> tuple[int, bytes]:
        """The status and the body of the answer; ConnectionError where there is none."""
        address, head = self._where.get(url) or self._found(url, headers)
        body = _ENCODE(fields).encode()
        try:
            connection = self._client.idle(address)
            if connection is None:
                connection = await self._client.connect(address, _SCHEDULER)
            return await _asked(connection, b"%b%d\r\n\r\n%b" % (head, len(body), body))
        except Unreachable as error:
            raise ConnectionError(str(error)) from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _found(self, url: str, headers: Mapping[str, str]) -> tuple[str, bytes]:
        """Where a URL leads, and the head of what is sent there up to the length of the body."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url} is no URL of plain HTTP")
        lines = [f"POST {parts.path} HTTP/1.1", f"host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += ["content-type: application/json", "content-length: "]
        address = f"tcp:{parts.hostname}:{parts.port or _PORT}"
        found = self._where[url] = address, "\r\n".join(lines).encode("latin-1")
        return found


async def _asked(connection: Connection, data: bytes) -> tuple[int, bytes]:
    try:
        await connection.ask(_SCHEDULER, data)
        body = connection.take()
        while not connection.complete:
            if not connection.has_news:
                await connection.more()
            body += connection.take()
        return connection.status, body
    finally:
        connection.let_go()
