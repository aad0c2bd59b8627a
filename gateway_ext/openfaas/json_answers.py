"""Routes of the management: requests within bounds, answers as JSON, errors as text."""

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from common.foreign_text import plain
from gateway_ext import error_statuses
from gateway_ext.errors import GatewayError, TooLarge, is_full_disk

_log = logging.getLogger(__name__)

_DISK_FULL = 507
# The largest function description or secret: above what Kubernetes stores of either.
_MOST_BYTES = 4 << 20


def route(path: str, **handlers: Callable[[Request], Awaitable[Response]]) -> Route:
    async def handle(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](request)

    return Route(path, handle, methods=list(handlers))


async def disk_failed(request: Request, error: Exception) -> Response:
    """Answer 507 where the disk is full; any other failure of a file is a defect of ours."""
    if not is_full_disk(error):
        raise error
    _log.error("%s %s failed: %s", request.method, request.url.path, error)
    return PlainTextResponse(f"the gateway's disk is full: {error}", _DISK_FULL)


async def body_of(request: Request) -> bytes:
    """Raise TooLarge as soon as the body exceeds the limit."""
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > _MOST_BYTES:
            raise TooLarge(_MOST_BYTES)
    return bytes(parts)


def shown(value: Any, status: int = 200) -> Response:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


def done(status: int = 202) -> Response:
    return Response(status_code=status)


async def no_route(request: Request, error: Exception) -> Response:
    """Respond that nothing is at this path, or nothing for this method."""
    assert isinstance(error, HTTPException), "registered for HTTPException alone"
    explained = f"{request.method} {plain(request.url.path)}: {error.detail}"
    return PlainTextResponse(explained, error.status_code, error.headers)


async def failed(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, GatewayError), "registered for GatewayError alone"
    answer = PlainTextResponse(str(error), error_statuses.status_of(error))
    for name, value in error_statuses.headers_of(error):
        answer.headers[name.decode()] = value.decode()
    return answer
