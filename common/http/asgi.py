"""The types of ASGI, and whole responses in one call."""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

_TEXT = (b"content-type", b"text/plain; charset=utf-8")


def header_in(scope: Scope, name: bytes) -> bytes:
    """The first header of a request with this name; nothing if there is none."""
    headers: Sequence[Header] = scope["headers"]
    return next((value for known, value in headers if known == name), b"")


async def send_response(
    send: Send, status: int, body: bytes = b"", headers: Sequence[Header] = (_TEXT,)
) -> None:
    """Send one whole response; its length is added to the headers."""
    shown = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": shown})
    await send({"type": "http.response.body", "body": body})


async def send_text(send: Send, status: int, text: str, headers: Sequence[Header] = ()) -> None:
    """Answer in plain text, as OpenFaaS does where something is wrong."""
    await send_response(send, status, text.encode(), (_TEXT, *headers))


async def until_disconnected(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
