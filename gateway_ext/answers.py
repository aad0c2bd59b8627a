"""Requests and answers of the management routes: bodies within bounds, JSON, errors as text."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway_ext import refusals
from gateway_ext.errors import GatewayError, TooLarge

# A function's description, or a secret: more than Kubernetes stores of either.
_MOST_BYTES = 4 << 20


async def body_of(request: Request) -> bytes:
    """The whole body; TooLarge as soon as it is more than any description needs."""
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > _MOST_BYTES:
            raise TooLarge(_MOST_BYTES)
    return bytes(parts)


def shown(value: Any, status: int = 200) -> Response:
    """A value as JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


def done(status: int = 202) -> Response:
    """It was accepted; there is nothing to say."""
    return Response(status_code=status)


async def failed(request: Request, error: Exception) -> Response:
    """What is wrong, in plain text."""
    del request
    assert isinstance(error, GatewayError), "registered for no other"
    answer = PlainTextResponse(str(error), refusals.status_of(error))
    for name, value in refusals.headers_of(error):
        answer.headers[name.decode()] = value.decode()
    return answer
