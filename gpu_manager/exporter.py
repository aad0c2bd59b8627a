"""Answers Prometheus and health checks over HTTP: `GET /metrics`, `/healthz`, `/readyz`."""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from gpu_manager.errors import BadSetting
from scheduler.exposition import CONTENT_TYPE

log = logging.getLogger(__name__)

_HEAD_BYTES = 8192
_WITHIN_S = 5.0
_MOST_CONNECTIONS = 32
_PLAIN = "text/plain; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}
_UNAVAILABLE = 503


class Told(NamedTuple):
    """An answer."""

    status: int
    body: bytes
    kind: str = _PLAIN


class Exporter:
    """A tiny server for what is read and changes nothing; whoever reaches its port may read.

    `metrics` is the page; `trouble` says in words why the node is of no use now, or is empty.
    """

    def __init__(self, metrics: Callable[[], bytes], trouble: Callable[[], str]) -> None:
        self._metrics = metrics
        self._trouble = trouble
        self._server: asyncio.Server | None = None
        self._busy: dict[asyncio.Task[None], None] = {}  # the oldest first

    @property
    def address(self) -> tuple[str, int]:
        """Where it answers."""
        assert self._server is not None, "it was started"
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def start(self, host: str, port: int) -> None:
        """Answer there from now on; BadSetting where that cannot be."""
        try:
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=_HEAD_BYTES, reuse_address=True
            )
        except OSError as error:
            detail = error.strerror or str(error)
            raise BadSetting("metrics", f"{host}:{port}", detail) from error
        log.info("metrics at http://%s:%d/metrics", *self.address)

    async def stop(self) -> None:
        """Answer nobody any more."""
        if self._server is None:
            return
        self._server.close()
        for task in self._busy:
            task.cancel()
        if self._busy:
            await asyncio.wait(self._busy)
        await self._server.wait_closed()
        self._server = None

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Whoever asks now goes before who has said nothing for long: it may be a health check."""
        staying = [task for task in self._busy if not task.cancelling()]
        if len(staying) >= _MOST_CONNECTIONS:
            staying[0].cancel()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._busy[task] = None
        task.add_done_callback(lambda done: self._left(done, writer))

    def _left(self, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        """The end of the connection, whatever came: also of a task that never began to run."""
        del self._busy[task]
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request."""
        try:
            async with asyncio.timeout(_WITHIN_S):
                head = await _head(reader)
                told = Told(400, b"no HTTP request\n") if head is None else self._answer(head)
                writer.write(_bytes(told, body=head is None or not head.startswith(b"HEAD ")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError) as error:
            log.debug("a reader of metrics: %s", error)

    def _answer(self, head: bytes) -> Told:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in {b"GET", b"HEAD"}:
            return Told(405, b"GET is wanted\n")
        if path == b"/metrics":
            return Told(200, self._metrics(), CONTENT_TYPE)
        if path == b"/healthz":
            return Told(200, b"alive\n")
        if path == b"/readyz":
            trouble = self._trouble()
            return Told(_UNAVAILABLE, f"{trouble}\n".encode()) if trouble else Told(200, b"ready\n")
        return Told(404, b"nothing is here\n")


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """Up to the empty line; None where that is no head."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None
    first = head.partition(b"\r\n")[0]
    return first if first.endswith((b" HTTP/1.1", b" HTTP/1.0")) else None


def _bytes(told: Told, *, body: bool) -> bytes:
    reason = _REASONS.get(told.status, "Service Unavailable")
    head = (
        f"HTTP/1.1 {told.status} {reason}\r\ncontent-type: {told.kind}\r\n"
        f"content-length: {len(told.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (told.body if body else b"")
