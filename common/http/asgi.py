"""ASGI: its types, whole responses in one call, bounded bodies, and clients that leave."""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
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
    return next((value for key, value in headers if key == name), b"")


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
    while (await receive())["type"] != "http.disconnect":
        pass


class BodyOverBound(Exception):
    """A request's body is larger than this server reads."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"the body is larger than {most_bytes} bytes")


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """The whole body; BodyOverBound as soon as more comes, or is announced."""
    if announced_bytes(scope) > most_bytes:
        raise BodyOverBound(most_bytes)
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body", False):
        message = await receive()
        body += message.get("body", b"")
        if len(body) > most_bytes:
            break
    if len(body) > most_bytes:
        raise BodyOverBound(most_bytes)
    return body


def bounded(app: App, most_bytes: int) -> App:
    """The application, which is not given more of a body: the client is answered 413 instead."""

    async def app_of_bounded_bodies(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            body = _BoundedBody(scope, receive, send, most_bytes)
            await app(scope, body.receive, body.send)
        else:
            await app(scope, receive, send)

    return app_of_bounded_bodies


class _BoundedBody:
    """One request: to its application, a client with too large a body has gone away."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._most_bytes = most_bytes
        self._bytes = announced_bytes(scope)
        self._counted_bytes = 0
        self._answered = self._refused = False

    async def receive(self) -> Message:
        if self._bytes <= self._most_bytes:
            message = await self._receive()
            self._counted_bytes += len(message.get("body", b""))
            if self._counted_bytes <= self._most_bytes:
                return message
            self._bytes = self._counted_bytes
        if not self._answered and not self._refused:
            self._refused = True
            await send_text(self._send, _TOO_LARGE, f"{BodyOverBound(self._most_bytes)}\n")
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self._refused:
            self._answered = True
            await self._send(message)


def announced_bytes(scope: Scope) -> int:
    """The length by the headers, which the server has checked; 0 where they do not tell."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)


_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


# Our server puts a ClientWatch here; with another server an application waits for its message.
_KEY = "gpufaas.client"


class ClientWatch:
    """The client of one request, as long as the request has no complete response."""

    __slots__ = ("_call", "has_left")

    def __init__(self) -> None:
        self._call: Callable[[], object] | None = None
        self.has_left = False

    def start(self, call: Callable[[], object]) -> None:
        """Call this once the client has left; at once, if that was before."""
        if self.has_left:
            call()
        else:
            self._call = call

    def stop(self) -> None:
        self._call = None

    def left(self) -> None:
        self.has_left = True
        call, self._call = self._call, None
        if call is not None:
            call()


def offer_watch(scope: Scope) -> None:
    """Let the application watch the client of a request that begins."""
    scope[_KEY] = ClientWatch()


def watch_in(scope: Scope) -> ClientWatch | None:
    """The watch of a request's client; None if the server offers none."""
    watch = scope.get(_KEY)
    return watch if isinstance(watch, ClientWatch) else None
