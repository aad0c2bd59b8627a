"""Serves Prometheus and health checks over HTTP: `GET /metrics`, `/healthz`, `/readyz`."""

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from http import HTTPStatus

from common.http.asgi import Receive, Scope, Send, send_response
from common.http.server import listen, serving
from common.http.server_protocol import Limits
from common.telemetry.metrics import CONTENT_TYPE
from gpu_manager.errors import BadSetting

log = logging.getLogger(__name__)

_LIMITS = Limits(head_bytes=8192, head_s=5.0, keep_alive_s=5, connections=32)
_DRAIN_S = 1.0
_PLAIN = "text/plain; charset=utf-8"


class Exporter:
    """The node's read-only HTTP server; it needs no credentials.

    `metrics` renders the page; `not_ready_reason` returns why the node cannot serve, or "". At the
    connection limit, the oldest idle connection is dropped, so that health checks can connect.
    """

    def __init__(self, metrics: Callable[[], bytes], not_ready_reason: Callable[[], str]) -> None:
        self._metrics = metrics
        self._not_ready_reason = not_ready_reason
        self._exits = AsyncExitStack()
        self._address: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        assert self._address is not None, "the exporter was started"
        return self._address

    async def start(self, host: str, port: int) -> None:
        """Start to serve at this address; raise BadSetting if that is not possible."""
        try:
            listener = listen(host, port)
        except OSError as error:
            detail = error.strerror or str(error)
            raise BadSetting("metrics", f"{host}:{port}", detail) from error
        self._address = listener.getsockname()[:2]
        await self._exits.enter_async_context(
            serving(self._serve, listener, _DRAIN_S, limits=_LIMITS)
        )
        log.info("metrics at http://%s:%d/metrics", *self.address)

    async def stop(self) -> None:
        await self._exits.aclose()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        path = scope["path"]
        status, body = self._response(scope["method"], path)
        kind = CONTENT_TYPE if status == HTTPStatus.OK and path == "/metrics" else _PLAIN
        headers = ((b"content-type", kind.encode()), (b"connection", b"close"))
        await send_response(send, status, body, headers)

    def _response(self, method: str, path: str) -> tuple[int, bytes]:
        if method not in {"GET", "HEAD"}:
            return 405, b"the method must be GET\n"
        if path == "/metrics":
            return 200, self._metrics()
        if path == "/healthz":
            return 200, b"alive\n"
        if path == "/readyz":
            reason = self._not_ready_reason()
            return (503, f"{reason}\n".encode()) if reason else (200, b"ready\n")
        return 404, b"no such path\n"
