"""Answers to clients of HTTP/1.0, such as `ab`: they know neither chunks nor trailers."""

from collections.abc import Sequence

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from common.http.asgi import Header, Message, Scope, Send

_VERSION = "1.0"
_LENGTH, _CODING = b"content-length", b"transfer-encoding"
_WITHOUT_BODY = frozenset({204, 304})


def request_of(send: Send) -> RequestResponseCycle:
    """uvicorn's own record of the request whose answer this sends."""
    request = getattr(send, "__self__", None)
    assert isinstance(request, RequestResponseCycle), "uvicorn hands over a method of its request"
    return request


def readable_by_client(scope: Scope, send: Send) -> Send:
    """What sends an answer that the request's client can read.

    To an HTTP/1.0 client, an answer of unknown length lasts until its connection is closed.
    """
    return _Unframed(scope["method"], send) if scope["http_version"] == _VERSION else send


class _Unframed:
    """Sends one answer without chunks."""

    def __init__(self, method: str, send: Send) -> None:
        self._has_body = method != "HEAD"
        self._request = request_of(send)
        self._send = send
        self._lengthless = False

    async def __call__(self, message: Message) -> None:
        """Send a part of the answer; uvicorn compares each body with a length."""
        if message["type"] == "http.response.start":
            headers: Sequence[Header] = [
                one for one in message.get("headers", ()) if one[0].lower() != _CODING
            ]
            has_length = any(name.lower() == _LENGTH for name, _ in headers)
            self._lengthless = self._has_body and not has_length
            if self._lengthless and message["status"] not in _WITHOUT_BODY:
                self._request.chunked_encoding = False
            message = {**message, "headers": headers}
        elif self._lengthless:
            self._request.expected_content_length = len(message.get("body", b""))
        await self._send(message)
