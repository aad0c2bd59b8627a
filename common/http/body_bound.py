"""Bodies of requests up to a size."""

from http import HTTPStatus

from common.http.asgi import App, Message, Receive, Scope, Send, send_text


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
        """The next piece of the body."""
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
        """Send the application's answer, unless the request was refused."""
        if not self._refused:
            self._answered = True
            await self._send(message)


def announced_bytes(scope: Scope) -> int:
    """The length by the headers, which the server has checked; 0 where they do not tell."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)


_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
